"""Where results go: JSON lines always, Weights & Biases when asked. Neither can fail a run by being away."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from logitless.lab.tools import result_files


class Tracker:
    """Writes records to a JSON-lines file and, unless ``mode`` is ``disabled``, to Weights & Biases.

    ``online`` without a key becomes ``offline``. Anything that goes wrong with W&B is said once, and the run goes on.
    """

    def __init__(self, path: str | Path, *, mode: str, project: str, name: str, config: dict[str, Any]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._run: Any = None
        if mode == "disabled":
            return
        if mode == "online" and not (os.environ.get("WANDB_API_KEY") or (Path.home() / ".netrc").exists()):
            self._say("no W&B key found: logging offline")
            mode = "offline"
        try:
            import wandb

            self._run = wandb.init(project=project, name=name, config=config, mode=mode, dir=str(self.path.parent))
        except ImportError:
            self._say("wandb is not installed (pip install 'logitless[wandb]'); JSON lines only")
        except Exception as error:
            self._say(f"W&B is not available ({type(error).__name__}: {error}); JSON lines only")

    def _say(self, text: str) -> None:
        print(f"tracking: {text}", file=sys.stderr)

    def log(self, record: dict[str, Any]) -> None:
        """Append a record."""
        result_files.append(self.path, record)
        if self._run is not None:
            try:
                self._run.log({k: v for k, v in record.items() if isinstance(v, (int, float, bool))})
            except Exception as error:
                self._say(f"W&B stopped ({type(error).__name__}: {error}); JSON lines only")
                self._run = None

    def close(self) -> None:
        """Finish the W&B run, if open."""
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                self._say(f"W&B did not finish cleanly ({type(error).__name__}: {error})")
            self._run = None
