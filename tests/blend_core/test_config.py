"""Every wrong setting is one line that names the key; every shipped preset loads."""

from __future__ import annotations

import json

import pytest

from blend_core.backbone import Backbone
from blend_core.config import parse_experiment
from blend_core.errors import ConfigError
from blend_core.methods import BUILT_IN, build_method
from blend_core.settings import experiment_from_run_config, load_experiment, preset_names


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rouns=3", r"rouns: unknown key; did you mean rounds\?"),
        ("method.gama=0.3", r"method.gama: unknown key; did you mean method.gamma\?"),
        ("method={name: promptfl, context_lenght: 4}", r"; did you mean method.context_length\?"),
        ("method={name: fedotp, epsilom: 0.1}", r"epsilom: .*; did you mean method.epsilon\?"),
        # A field of another method is no near miss.
        ("method={name: promptfl, vision_rank: 4}", "method.vision_rank: unknown key$"),
        ("train.learning_rate=1", "train.learning_rate: unknown key"),
        ("method.gamma=1.5", r"method.gamma = 1.5: .*less than or equal to 1"),
        ("method.gamma=high", r'method.gamma = "high": .*number'),
        ("method.vision_rank=true", "method.vision_rank = true: expected a number from 1"),
        ("rounds=0", r"rounds = 0: .*greater than or equal to 1"),
        ("rounds=2.5", r"rounds = 2.5: .*integer"),
        ('seed="3"', r'seed = "3": .*integer'),
        ("seed=-1", "seed = -1"),
        ("method.name=blent", "method.name = 'blent': unknown; known: adaptformer, blend, "),
        ("data.template=no braces", "must contain {} exactly once"),
        ("data.kind=cats", r"data.kind = \"cats\""),
        ("train.device=gpu", "train.device"),
        ("train.lr=.nan", "train.lr"),
        ("rounds", "expected key=value"),
        ("seed.x=1", "seed is a value, not a group"),
        ("rounds=[", "not valid YAML"),
        ("server.min_replies=9", r"server.min_replies \(9\) exceeds the 4 clients of a round"),
        ("seed=2020-13-45", "not valid YAML"),
        ("seed=!!int x", "not valid YAML"),
        ("seed=!!timestamp x", "not valid YAML"),
        ("method.name=[1]", "method must be a mapping of settings with a name"),
        ("data.classes=[cat]", "classes needs at least two names"),
        ("data.classes=[cat, Cat, dog]", "two that read the same"),
        ('data.classes=[cat, ""]', "a name that is empty"),
        ("method={1: 2}", "method must be a mapping of settings with a name"),
        ("method=&a {x: *a}", "contain themselves|unknown key"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_experiment("quickstart", [override])
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_federation_vocabulary_needs_its_list():
    shared = ["data.kind=folders", "data.label_space=federation"]
    with pytest.raises(ConfigError, match=r"needs data\.classes"):
        load_experiment("quickstart", shared)
    load_experiment("quickstart", [*shared, "data.classes=[cat, dog]"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.manifest=m.json"], r"manifest .*m.json is for data sets, not shapes; leave it out"),
        (["data.kind=dtd", "data.test_per_class=5"], "test_per_class 5 is for shapes, not dtd"),
        (["data.kind=dtd", "data.holdout=0.2"], "holdout 0.2 is for folders, not dtd"),
        (["data.kind=folders", "data.shots=4"], "shots 4 is for shapes and data sets, not folders"),
        (["data.kind=shapes", "data.blocks=round"], "blocks round is for data sets, not shapes"),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_experiment("quickstart", settings)


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("rounds: 7\nmethod: {gamma: 0.5}\n")
    experiment = load_experiment(str(path), ["rounds=9", "train.lr=1e-3"])
    assert experiment.rounds == 9
    assert experiment.method.gamma == 0.5
    assert experiment.train.lr == 0.001
    assert experiment.train.batch_size == 16


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"absent.yaml: no such file, and not a preset \(adaptformer"
    ):
        load_experiment(str(tmp_path / "absent.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("- a list")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_experiment(str(broken))


def test_presets_are_there_and_load():
    named = {"quickstart", "blend-paper", "blend-code", *BUILT_IN} - {"blend"}
    assert set(preset_names()) == named
    for name in preset_names():
        experiment = load_experiment(name)
        # The presets of the papers fit their backbone.
        build_method(experiment.method, Backbone.describe(experiment.backbone), 0)
    paper, code = load_experiment("blend-paper").method, load_experiment("blend-code").method
    assert (paper.gamma, paper.lambda_, paper.vision_rank, paper.text_rank) == (0.09, 0.2, 16, 16)
    assert (code.gamma, code.lambda_, code.vision_rank, code.text_rank) == (0.9, 0.5, 128, 128)
    assert (paper.projection_rank, code.projection_rank) == (256, 128)


def test_every_field_has_a_help_text():
    from pydantic import BaseModel

    from blend_core.config import Experiment
    from blend_core.methods import BUILT_IN, config_class

    def fields(model, prefix=""):
        for name, field in model.model_fields.items():
            yield f"{prefix}{name}", field
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from fields(field.annotation, f"{name}.")

    found = [*fields(Experiment)]
    for name in BUILT_IN:
        found += fields(config_class(name), "method.")
    bare = [n for n, f in found if not f.description and "." in n]
    assert len(found) > 40
    assert bare == []


def test_the_run_config_carries_an_experiment_unchanged():
    experiment = load_experiment("quickstart", ["data.kind=folders", "data.classes=[red fox, bus]"])
    carried = {"experiment": json.dumps(experiment.to_json()), "out": "/x", "rounds": ""}
    assert experiment_from_run_config(carried) == experiment
    with pytest.raises(ConfigError, match=r"method\.rankk: unknown key"):
        experiment_from_run_config({"method.rankk": 3})


def test_yaml_means_what_it_says(tmp_path):
    folders = ["data.kind=folders", 'data.classes=["1e3", "no", red]']
    assert load_experiment("quickstart", folders).data.classes == ["1e3", "no", "red"]
    assert load_experiment("quickstart", ["train.lr=1E-3"]).train.lr == 0.001
    path = tmp_path / "twice.yaml"
    path.write_text("rounds: 3\nrounds: 4\n")
    with pytest.raises(ConfigError, match="'rounds' is given twice"):
        load_experiment(str(path))


def test_paths_count_from_where_the_user_is(tmp_path, monkeypatch):
    (tmp_path / "sites").mkdir()
    (tmp_path / "w.pt").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    given = ["data.kind=folders", "data.root=sites", "backbone.weights=w.pt"]
    experiment = load_experiment("quickstart", given)
    assert experiment.data.root == str(tmp_path / "sites")
    assert experiment.backbone.weights == str(tmp_path / "w.pt")
    assert load_experiment("quickstart").backbone.weights == "builtin"


def test_seed_zero_is_a_seed():
    experiment = parse_experiment({"seed": 0, "data": {"partition_seed": 0, "fewshot_seed": 3}})
    assert (experiment.seed, experiment.partition_seed, experiment.fewshot_seed) == (0, 0, 3)
    assert parse_experiment({"seed": 4}).partition_seed == 4
