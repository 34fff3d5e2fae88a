"""A run's row in TensorBoard's HParams tab, and the tab's columns. No torch.

The tab opens with five hyperparameters, those marked as different first, then by name, and with the first five metrics.
It takes this list from the events of any one run for all runs, or, where none has one, makes it of every scalar and
value in sight. So every run writes the same list, whatever its values: a text of what differs from `default` and four
keys are marked, and every other key that can change a result waits in the list at the left, to be ticked.
"""

import json
from collections.abc import Mapping
from typing import Any

from utils.keys import Fact, Keys

CHANGES = "also changed"  # against `default`, beside the four; by its name the first of the marked columns
ALWAYS_SHOWN = ("batch_size", "lr", "max_epochs", "model")
RESULT_TAGS = "result/"
METRICS = (
    "best_acc1", "best_epoch", "last_acc1", "last_loss", "seconds", "images_per_sec", "test_acc1", "test_loss",
)  # fmt: skip
NUMBERS = {"integer", "number"}
BOXES = 10


def compared(keys: Keys) -> dict[str, float | str]:
    """The run's values by column; a number that is null has none."""
    values, defaults = keys.model_dump(mode="json"), type(keys)().model_dump(mode="json")
    columns = _columns(type(keys))
    changed = [key for key in columns if key not in ALWAYS_SHOWN and values[key] != defaults[key]]
    row: dict[str, float | str] = {CHANGES: ", ".join(f"{key}={_word(values[key])}" for key in changed)}
    for key, description in columns.items():
        if not _is_number(description):
            row[key] = _word(values[key])
        elif values[key] is not None:
            row[key] = values[key]
    return row


def start_summary(keys: Keys) -> Any:
    """The start of the run's row with its values, and the tab's columns, as a `Summary` for an event file.

    PyTorch's own function makes the columns of this run's values and cannot mark any."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import SessionStartInfo

    start = SessionStartInfo()
    for name, value in compared(keys).items():
        if isinstance(value, str):
            start.hparams[name].string_value = value
        else:
            start.hparams[name].number_value = value
    return _summary(experiment=_experiment(type(keys)), session_start_info=start)


def end_summary() -> Any:
    """The end of the run's row: it has succeeded."""
    from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
    from tensorboard.plugins.hparams.plugin_data_pb2 import SessionEndInfo

    return _summary(session_end_info=SessionEndInfo(status=STATUS_SUCCESS))


def _columns(kind: type[Keys]) -> dict[str, Mapping[str, Any]]:
    """The keys that can change a result, each with its JSON schema."""
    silent = kind.with_fact(Fact.NO_HYPERPARAMETER)
    return {key: schema for key, schema in kind.model_json_schema()["properties"].items() if key not in silent}


def _is_number(description: Mapping[str, Any]) -> bool:
    types = {form.get("type") for form in description.get("anyOf", [description])}
    return bool(types & NUMBERS) and types <= NUMBERS | {"null"}


def _experiment(kind: type[Keys]) -> Any:
    """The tab's columns."""
    from tensorboard.plugins.hparams.api_pb2 import DATA_TYPE_FLOAT64, DATA_TYPE_STRING, Experiment

    experiment, columns = Experiment(), _columns(kind)
    for name, description in {CHANGES: {"enum": list(columns)}, **columns}.items():
        number = DATA_TYPE_FLOAT64 if _is_number(description) else DATA_TYPE_STRING
        info = experiment.hparam_infos.add(name=name, type=number, differs=name in (CHANGES, *ALWAYS_SHOWN))
        info.domain_discrete.extend(map(_word, _choices(description)))
    for name in METRICS:
        experiment.metric_infos.add().name.tag = RESULT_TAGS + name
    return experiment


def _choices(description: Mapping[str, Any]) -> list[Any]:
    """The values by which the tab filters a text: fewer than BOXES get a box each, more give a field for a pattern."""
    if description.get("type") == "boolean":
        return [True, False]
    named = [value for form in description.get("anyOf", []) for value in form.get("enum", [])]
    # other texts are allowed too, which boxes would leave out
    return description.get("enum", named if len(named) >= BOXES else [])


def _word(value: Any) -> str:
    """Booleans are words, too, which the tab filters by; it would show them as 0.0000 and 1.0000."""
    return value if isinstance(value, str) else json.dumps(value)


def _summary(**parts: Any) -> Any:
    """Each part as the plugin's data, under the tag by which TensorBoard knows it."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    summary = Summary()
    for name, part in parts.items():
        data = HParamsPluginData(version=PLUGIN_DATA_VERSION, **{name: part})
        plugin = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=data.SerializeToString())
        summary.value.add(tag=f"_hparams_/{name}", metadata=SummaryMetadata(plugin_data=plugin))
    return summary
