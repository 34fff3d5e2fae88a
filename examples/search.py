"""Search hyper-parameters with Optuna; edit `objective` for other settings.

    pip install -c constraints.txt ".[search]"
    python examples/search.py --trials 20 --out expts/search

Each trial is one `api.train` in a folder of its own. The study is kept in DIR/study.sqlite: the same command continues
until there are N trials. Selection uses held-out training images, not the test images.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import optuna

sys.path.insert(0, str(Path(__file__).parents[1]))  # after `pip install .`: from resnet50_at_scale.api import train
from api import train
from utils.errors import ExpectedError


def search(out: Path, trials: int, config: str = "cifar100-cpu", **settings: Any) -> optuna.Study:
    """Train until the study in the folder `out` has `trials` trials. Training that breaks down is a pruned trial;
    an interrupted trial, or an error in the settings or the data, ends the search and is not counted."""

    def objective(trial: optuna.Trial) -> float:
        tried = {
            "lr": trial.suggest_float("lr", 0.01, 0.1, log=True),
            "batch_size": trial.suggest_categorical("batch_size", [64, 128, 256]),
        }
        fixed = {"holdout_images": 5000, "save_checkpoint": False} | settings
        try:
            run = train(config, run_dir=out / f"trial-{trial.number}", resume="never", **fixed | tried)
        except ExpectedError as error:
            if error.exit_status != ExpectedError.exit_status:
                raise
            raise optuna.TrialPruned from error
        return run.metrics["last_acc1"]

    out.mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{out / 'study.sqlite'}"
    study = optuna.create_study(storage=storage, study_name="search", direction="maximize", load_if_exists=True)
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))  # a continued search samples other values
    ended = [trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]
    study.optimize(objective, max(0, trials - len(ended)))
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, metavar="N", help="in total (default: 20)")
    parser.add_argument("--out", type=Path, default=Path("expts/search"), metavar="DIR", help="default: expts/search")
    best = search(**vars(parser.parse_args())).best_trial
    print(f"best: trial {best.number}, {best.value:.2%}, {best.params}")
