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
    of_means = (70.92, 77.62, 71.90, 77.20, 82.77)
    for method, expected in zip(METHODS, of_means, strict=True):
        found = harmonic_mean([means[method]["per"], means[method]["gen"]])
        assert found == pytest.approx(expected, abs=0.006)
        assert abs(found - means[method]["hmean"]) > ROUNDING


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
    eight = {(entry["dataset"], entry["method"]): entry["gap"] for entry in listed}
    assert outside == {key: pytest.approx(gap, abs=0.0006) for key, gap in eight.items()}
    assert sum(len(rows.keys() & set(METHODS)) for rows in blend["datasets"].values()) == 50
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
    means, stds = blend["mean_over_datasets"], blend["std_over_datasets"]
    assert means["blend_gain"]["hmean"] == round(82.15 - 77.34, 2)
    assert stds["blend_gain"]["hmean"] == round(14.40 - 16.46, 2)
    # The mean of the ten gains is another number.
    gains = [
        rows["blend"]["hmean"] - max(rows[method]["hmean"] for method in METHODS[:-1])
        for rows in blend["datasets"].values()
    ]
    assert statistics.fmean(gains) == pytest.approx(3.92, abs=0.01)


def test_every_ablation_row_lies_below_the_harmonic_mean_of_its_means(papers):
    groups = ("ablation_aggregation", "ablation_rank_global", "ablation_rank_personal")
    rows = [row for group in groups for row in papers["blend"][group].values()]
    gaps = [row["hmean"] - harmonic_mean([row["per"], row["gen"]]) for row in rows]
    assert len(gaps) == 14
    assert (min(gaps), max(gaps)) == pytest.approx((-1.351, -0.042), abs=0.0006)
    # "No adapter" lies far closer than its neighbours in the two tables of ranks.
    none, *neighbours = gaps[5:]
    assert none == max(gaps)
    assert (min(neighbours), max(neighbours)) == pytest.approx((-0.73, -0.37), abs=0.006)


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


def test_no_two_way_mean_explains_the_printed_hm_of_pfedmma(papers):
    """A mean of harmonic means never exceeds the harmonic mean of the means."""
    means = papers["pfedmma"]["main_table"]["mean_over_datasets"]
    for name, pair, bound in (
        ("promptfl", ("base", "novel"), 81.59),
        ("promptfl", ("local", "novel"), 81.59),
        ("zero_shot_clip", ("local", "base"), 76.58),
    ):
        assert harmonic_mean([means[name][part] for part in pair]) == pytest.approx(
            bound, abs=0.006
        )
        assert means[name]["hm"] > bound


def test_the_gains_in_the_text_of_pfedmma_are_relative_to_fedpgp_not_to_pfedmoap(papers):
    means = papers["pfedmma"]["main_table"]["mean_over_datasets"]
    ours, fedpgp, pfedmoap = (means[name] for name in ("pfedmma", "fedpgp", "pfedmoap"))
    assert round(100 * (ours["novel"] / fedpgp["novel"] - 1), 2) == 13.69
    assert round(100 * (ours["hm"] / fedpgp["hm"] - 1), 1) == 6.4
    assert round(100 * (1 - ours["local"] / pfedmoap["local"]), 2) == 0.74
    assert round(ours["novel"] - pfedmoap["novel"], 2) == 14.89
    assert round(ours["hm"] - pfedmoap["hm"], 2) == 13.10
    assert round(ours["hm"] - means["promptfl"]["hm"], 2) == 1.06


def test_blend_generalises_worse_than_zero_shot_on_four_data_sets(blend):
    below = {
        dataset
        for dataset, rows in blend["datasets"].items()
        if rows["blend"]["gen"] < rows["zero_shot_clip"]["gen"]
    }
    assert below == {"stanford_cars", "oxford_flowers", "imagenet", "caltech101"}


def test_every_printed_number_is_a_percentage_with_two_decimals(blend, papers):
    rows = [rows[m] for rows in blend["datasets"].values() for m in METHODS]
    rows += papers["pfedmma"]["main_table"]["mean_over_datasets"].values()
    numbers = [value for row in rows for value in row.values()]
    assert len(numbers) == 50 * 3 + 6 * 4
    assert all(0 < value < 100 and round(value, 2) == value for value in numbers)


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
