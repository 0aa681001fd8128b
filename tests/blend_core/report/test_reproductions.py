"""Which runs make which table: every setting has its source, every row its number."""

from __future__ import annotations

import json

import pytest

from blend_core.config import DATASET_KINDS
from blend_core.errors import ConfigError
from blend_core.report.papers import printed, read_paper_tables
from blend_core.report.reproductions import plan, read_reproductions
from blend_core.settings import load_experiment

TABLES = read_reproductions()
PAPERS = read_paper_tables()

# Our setting -> its name among the papers' defaults.
NAMES = {
    "clients": "clients",
    "rounds": "rounds",
    "server.fraction": "participation",
    "data.shots": "shots",
    "data.alpha": "dirichlet_alpha",
    "data.boost": "dirichlet_boost",
    "data.template": "prompt",
    "data.partition_seed": "partition_seed",
    "train.optimizer": "optimizer",
    "train.momentum": "momentum",
    "train.lr": "learning_rate",
    "train.weight_decay": "weight_decay",
    "train.schedule": "lr_schedule",
    "train.batch_size": "train_batch_size",
    "train.local_epochs": "local_epochs",
    "evaluation.batch_size": "test_batch_size",
    "method.gamma": "gamma",
    "method.lambda": "lambda",
    "method.vision_rank": "rank_global",
    "method.text_rank": "rank_global",
    "method.projection_rank": "rank_personal",
    "method.rank": "shared_dim",
    "method.scale": "adapter_scale",
}


def planned(name, datasets=None, on_shapes=False, **given):
    return plan(TABLES[name], datasets, [0], on_shapes, given).planned


def row_of(name, row, dataset=None, on_shapes=False):
    found = [work for work in planned(name, None, on_shapes) if work.row.name == row]
    return next(work for work in found if dataset in (None, work.dataset))


def test_the_tables_have_the_rows_and_datasets_of_the_papers():
    for name, table in TABLES.items():
        rows = [row for row in table.rows if row.paper]
        assert bool(rows) == (name != "blend-gamma-lambda")
        templates = [text for text in (table.cells, table.mean, table.std) if text]
        for row in rows:
            for text in templates:
                for dataset in table.datasets:
                    for metric in table.metrics:
                        path = text.format(dataset=dataset, row=row.name)
                        assert printed(PAPERS, path, metric).value is not None, path
    assert list(TABLES["blend-table1"].datasets) == list(PAPERS["blend"]["main_table"]["datasets"])
    listed = PAPERS["pfedmma"]["main_table"]["setting"]["datasets"]
    assert list(TABLES["pfedmma-table1"].datasets) == listed


@pytest.mark.parametrize(
    ("name", "paper", "row"),
    [("blend-table1", "blend", "blend"), ("pfedmma-table1", "pfedmma", "pfedmma")],
)
def test_settings_are_the_papers_where_stated_and_the_codes_where_it_is_silent(name, paper, row):
    table, defaults = TABLES[name], PAPERS[paper]["defaults"]
    scopes = (table.protocol.common, table.protocol.methods[row])
    compared = set()
    for scope in scopes:
        for source in ("document", "code"):
            for key, value in getattr(scope, source).items():
                if key in NAMES and NAMES[key] in defaults[f"from_{source}"]:
                    compared.add(key)
                    assert defaults[f"from_{source}"][NAMES[key]] == value, key
                if source == "code" and key in NAMES:
                    assert defaults["from_document"].get(NAMES[key]) is None, key
    assert {"clients", "rounds", "data.shots", "train.lr", "train.batch_size"} <= compared


def test_the_settings_of_blend_are_those_of_its_preset():
    settings = row_of("blend-table1", "blend").settings
    preset = load_experiment("blend-paper").to_json()
    for key, value in settings.items():
        # What is unset in the preset holds for these data sets anyway.
        unset = ("data.partition", "data.alpha", "data.shots")
        if key not in ("data.kind", "evaluation.every", *unset):
            found = preset
            for part in key.split("."):
                found = found[part]
            assert found == value, key


def test_every_run_of_every_table_is_a_valid_experiment_on_the_papers_data():
    for name in TABLES:
        for work in planned(name, **{"data.root": "/data"}):
            overrides = [f"{key}={json.dumps(value)}" for key, value in work.settings.items()]
            experiment = load_experiment("blend-paper", overrides)
            assert experiment.data.kind in DATASET_KINDS, (name, work.dataset)
            assert experiment.data.root == "/data"
            assert experiment.method.name == work.row.method


def test_each_data_set_is_dealt_as_its_paper_says():
    kinds = {work.dataset: work.settings for work in planned("pfedmma-shift")}
    assert kinds["domainnet"]["data.kind"] == "domainnet10"
    assert kinds["office_caltech10"]["data.kind"] == "office_caltech10"
    for settings in kinds.values():
        assert "data.partition" not in settings, "the rule of domain sets is their own"
        assert settings["data.alpha"] == 0.5
        assert "data.shots" not in settings, "all images"
    assert row_of("blend-table1", "blend").settings["data.partition"] == "dirichlet-preferred"
    assert row_of("pfedmma-table1", "pfedmma").settings["data.partition"] == "disjoint"


@pytest.mark.parametrize(
    ("name", "items"),
    [
        (
            "blend-table1",
            {
                "gamma, weight of the personal head (opposite mixes)": ("0.09", "0.90"),
                "lambda, weight of the fused loss": ("0.2", "0.50"),
                "ranks, global / personal": ("16 / 256", "128 / 128"),
                "optimiser": ("SGD", "AdamW"),
                "partition": ("Dirichlet(0.01)", "plus 1 on a rotating client"),
                "input of the personal head": ("class token", "before the final norm"),
                "last, smaller batch of an epoch": ("not stated", "left out"),
            },
        ),
        (
            "pfedmma-table1",
            {
                "schedule": ("50 rounds x 2 epochs", "100 x 1"),
                "blocks of classes": ("disjoint", "round(classes / clients)"),
                "last, smaller batch of an epoch": ("not stated", "left out"),
            },
        ),
        (
            "pfedmma-shift",
            {
                "schedule": ("50 rounds x 2 epochs", "100 x 1"),
                "beta of the domain sets": ("0.5", "0.3"),
                "last, smaller batch of an epoch": ("not stated", "left out"),
            },
        ),
    ],
)
def test_no_conflict_of_the_protocol_is_hidden(name, items):
    found = {entry["item"]: entry for entry in TABLES[name].protocol.conflicts}
    assert set(found) == set(items)
    for item, (document, code) in items.items():
        assert document in found[item]["document"]
        assert code in found[item]["code"]


def test_gamma_and_lambda_of_the_released_code_stand_in_their_own_table_only():
    for name in ("blend-table1", "blend-ablation-aggregation", "blend-ablation-rank"):
        for work in planned(name):
            if work.row.method == "blend":
                assert (work.settings["method.gamma"], work.settings["method.lambda"]) == (
                    0.09,
                    0.2,
                )
    code = row_of("blend-gamma-lambda", "code").settings
    assert (code["method.gamma"], code["method.lambda"]) == (0.9, 0.5)


def test_a_dataset_and_a_row_have_the_last_word_before_the_user():
    domainnet = row_of("pfedmma-shift", "fedpgp", "domainnet").settings
    office = row_of("pfedmma-shift", "fedpgp", "office_caltech10").settings
    assert (domainnet["clients"], domainnet["server.fraction"]) == (30, 0.25)
    assert (office["clients"], office["server.fraction"]) == (12, 1.0)
    assert row_of("blend-ablation-rank", "personal.4").settings["method.projection_rank"] == 4
    for work in planned("blend-table1", ["dtd"], rounds=3):
        assert work.settings["rounds"] == 3
        assert work.binding["rounds"] == 50


def test_a_baseline_whose_settings_no_paper_states_binds_nobody_to_ours():
    binding = row_of("blend-table1", "pfedmoap").binding
    assert "train.lr" not in binding
    assert binding["rounds"] == 50


def test_fedotp_beside_pfedmma_has_the_settings_of_that_papers_scripts():
    work = row_of("pfedmma-table1", "fedotp")
    settings = {"method.epsilon": 0.1, "method.threshold": 0.01, "method.mass": 1.0}
    assert settings.items() <= work.settings.items()
    assert settings.items() <= work.binding.items()


def test_no_dataset_is_not_all_of_them():
    assert planned("blend-table1", []) == []


def test_an_unknown_dataset_is_one_line_that_lists_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        planned("pfedmma-shift", ["office"])
    assert str(caught.value) == (
        "--datasets office: not in pfedmma-shift; known: domainnet, office_caltech10"
    )
    with pytest.raises(ConfigError, match=r"--datasets dtd: not in --on shapes; known: shapes$"):
        planned("blend-table1", ["dtd"], True)


@pytest.mark.parametrize("key", ["method.aggregate", "data.kind", "seed"])
def test_what_a_table_varies_cannot_be_set(key):
    with pytest.raises(ConfigError, match=rf"--set {key}: varied by blend-ablation-aggregation"):
        plan(TABLES["blend-ablation-aggregation"], None, [0], True, {key: 1})
