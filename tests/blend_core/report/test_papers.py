"""The packaged numbers of the papers agree with themselves (PROTOCOL 4.4, 4.5)."""

from __future__ import annotations

import statistics

import pytest

from blend_core.metrics import harmonic_mean
from blend_core.report.papers import printed, read_paper_tables
from blend_core.significance import holm, paired_test

METHODS = ("zero_shot_clip", "mma_fedavg", "pfedmma", "pfedmoap", "blend")
METRICS = ("per", "gen", "hmean")
# Half a unit in the last printed place, and a little for floating point.
ROUNDING = 0.005 + 1e-6


@pytest.fixture(scope="module")
def papers():
    return read_paper_tables()


@pytest.fixture(scope="module")
def blend(papers):
    return papers["blend"]["main_table"]


def column(table, method, metric):
    return [dataset[method][metric] for dataset in table["datasets"].values()]


def test_the_mean_row_is_the_mean_of_each_column_and_not_the_harmonic_mean_of_means(blend):
    means = blend["mean_over_datasets"]
    assert (
        sum(
            abs(statistics.fmean(column(blend, m, metric)) - means[m][metric]) <= ROUNDING
            for m in METHODS
            for metric in METRICS
        )
        == 15
    )
    for method in METHODS:
        of_means = harmonic_mean([means[method]["per"], means[method]["gen"]])
        assert abs(of_means - means[method]["hmean"]) > ROUNDING


def test_the_spread_row_is_the_population_standard_deviation(blend):
    stds = blend["std_over_datasets"]
    for spread, matching in ((statistics.pstdev, 15), (statistics.stdev, 0)):
        assert (
            sum(
                abs(spread(column(blend, m, metric)) - stds[m][metric]) <= ROUNDING
                for m in METHODS
                for metric in METRICS
            )
            == matching
        )


def test_42_of_50_harmonic_means_follow_from_their_row_and_the_others_lie_below(papers, blend):
    outside = {}
    for dataset, rows in blend["datasets"].items():
        for method in METHODS:
            row = rows[method]
            gap = row["hmean"] - harmonic_mean([row["per"], row["gen"]])
            if abs(gap) > 0.01:
                outside[dataset, method] = gap
    check = papers["verification"]["per_dataset_hmean"]
    listed = check["below_only_explained_by_averaging_hmean_over_seeds"]
    assert set(outside) == {(entry["dataset"], entry["method"]) for entry in listed}
    assert len(outside) == 50 - 42
    assert all(gap < 0 for gap in outside.values())
    assert outside["eurosat", "mma_fedavg"] == pytest.approx(-0.170, abs=0.0006)


def test_nine_of_ten_gains_follow_from_the_printed_rows_and_pets_does_not(blend):
    off = {}
    for dataset, rows in blend["datasets"].items():
        best = max(rows[method]["hmean"] for method in METHODS[:-1])
        gain = rows["blend"]["hmean"] - best
        if abs(gain - rows["blend_gain"]["hmean"]) > 0.0101:
            off[dataset] = round(gain, 2)
    assert off == {"oxford_pets": 1.72}
    assert blend["mean_over_datasets"]["blend_gain"]["hmean"] == round(82.15 - 77.34, 2)


def test_every_ablation_row_lies_below_the_harmonic_mean_of_its_means(papers):
    groups = ("ablation_aggregation", "ablation_rank_global", "ablation_rank_personal")
    rows = [row for group in groups for row in papers["blend"][group].values()]
    gaps = [row["hmean"] - harmonic_mean([row["per"], row["gen"]]) for row in rows]
    assert len(gaps) == 14
    assert all(-1.3515 < gap < -0.0415 for gap in gaps)


def test_the_three_way_means_of_pfedmma_lie_below_those_of_the_averages(papers):
    means = papers["pfedmma"]["main_table"]["mean_over_datasets"]
    gaps = {
        name: round(row["hm"] - harmonic_mean([row["local"], row["base"], row["novel"]]), 2)
        for name, row in means.items()
    }
    assert gaps == {
        "zero_shot_clip": -0.04,
        "promptfl": -0.81,
        "fedpgp": -0.89,
        "fedotp": -1.15,
        "pfedmoap": -1.40,
        "pfedmma": -0.40,
    }


def test_across_datasets_blend_differs_from_its_baselines_as_the_protocol_says(blend):
    ours = dict(enumerate(column(blend, "blend", "hmean")))
    for method, t, p in (("mma_fedavg", 5.56, 0.0004), ("pfedmoap", 3.70, 0.005)):
        test = paired_test(ours, dict(enumerate(column(blend, method, "hmean"))))
        assert test.n == 10
        assert test.t == pytest.approx(t, abs=0.005)
        assert test.p == pytest.approx(p, rel=0.15)


def test_adjusted_for_ten_datasets_the_largest_printed_p_value_is_at_the_border(blend):
    adjusted = holm([row["blend_gain"]["p_value"] for row in blend["datasets"].values()])
    assert max(adjusted) == pytest.approx(0.050)


def test_a_number_is_found_by_its_path_and_a_missing_one_is_none(papers):
    assert printed(papers, "blend.main_table.datasets.dtd.blend", "gen").value == 64.32
    assert printed(papers, "blend.ablation_rank_global.none", "per").value == 89.50
    assert printed(papers, "blend.main_table.datasets.cifar10.blend", "gen").value is None
    assert printed(papers, "blend.ablation_rank_global.none", "novel").value is None
    assert printed(papers, None, "per").value is None


def test_a_number_that_must_not_be_compared_with_says_why(papers):
    found = printed(papers, "pfedmma.feature_and_label_shift.domainnet.pfedmma", "local")
    assert found.value == 47.17
    assert "pair images with labels of other images" in found.barred
    assert printed(papers, "blend.main_table.datasets.dtd.blend", "gen").barred is None
