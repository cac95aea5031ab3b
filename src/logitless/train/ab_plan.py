"""Which runs an A/B consists of: its arms, a control, other seeds, and the replays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from logitless.train import replay as replay_test
from logitless.train.config import ConfigError, Loss, TrainConfig
from logitless.train.config_check import check
from logitless.train.folder import run_folder

CONTROL = "control"


def arms_of(config: TrainConfig) -> dict[str, TrainConfig]:
    """The arms' configurations, the baseline first: they differ in the loss and in where they are kept."""
    folder = run_folder(config)
    if config.kernel.enabled is not None:
        raise ConfigError("kernel.enabled: an A/B sets the backend of its arms; use ab.baseline and ab.kernel")
    out: dict[str, TrainConfig] = {}
    for name, loss in _losses(config).items():
        arm = dataclasses.replace(
            config,
            run_dir=str(folder / name),
            train=dataclasses.replace(config.train, loss=loss),
            warm_start=dataclasses.replace(config.warm_start, cache=config.warm_start.cache or str(folder)),
        )
        try:
            check(arm)
        except ConfigError as error:
            raise ConfigError(f"arm {name}: {error}") from None
        twin = next((n for n, other in out.items() if other.train.loss == loss), None)
        if twin is not None:
            raise ConfigError(f"ab.arms: {twin} and {name} are the same, {loss}; each arm needs a loss of its own")
        out[name] = arm
    return out


def _losses(config: TrainConfig) -> dict[str, Loss]:
    """``train.loss`` of each arm."""
    shared = config.train.loss
    if config.ab.arms:
        return {name: _with_overrides(name, shared, own) for name, own in config.ab.arms.items()}
    kernel = config.ab.kernel or shared.backend
    if kernel == config.ab.baseline:
        raise ConfigError(f"ab.kernel: both arms would use {kernel!r}; set ab.kernel or train.loss.backend")
    # The baseline is dense: a sparse backward is the kernel's.
    baseline = dataclasses.replace(shared, backend=config.ab.baseline, sparse_backward="off")
    return {"baseline": baseline, "kernel": dataclasses.replace(shared, backend=kernel)}


def _with_overrides(name: str, shared: Loss, own: dict[str, Any]) -> Loss:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(shared), own))  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"ab.arms.{name}.{key}: {str(error).splitlines()[0]}") from None


@dataclasses.dataclass
class Plan:
    """The runs of an A/B: free runs, followed by replays on the baseline's completions."""

    arms: dict[str, TrainConfig]
    free: dict[str, TrainConfig]
    """The arms, a free control, and the arms with other seeds."""
    replays: dict[str, TrainConfig]
    """Replays of the control and each arm; of the baseline only to compare times."""


def plan_of(config: TrainConfig) -> Plan:
    """Which runs the configuration asks for."""
    arms, c = arms_of(config), config.ab
    reserved = {CONTROL, "replay", "warm_start"} & set(arms)
    if reserved:
        raise ConfigError(f"ab.arms: {min(reserved)!r} is a name that an A/B keeps for itself; choose another")
    if c.turns and (c.parallel or not c.replay or config.rollout.kind == "random"):
        raise ConfigError("ab.turns: replays in turns need ab.replay, sampled completions, and no ab.parallel")
    folder, first = run_folder(config), next(iter(arms))
    if c.replay:
        rollout = dataclasses.replace(config.rollout, record=c.replay_steps or config.train.steps)
        # Random completions are the same in all arms: every arm is traced as it is.
        for name in [first] if config.rollout.kind == "sample" else list(arms):
            arms[name] = dataclasses.replace(arms[name], rollout=rollout)
    free, replays = dict(arms), {}
    if c.control:
        free[CONTROL] = _without_record(replay_test.control_of(arms[first]), folder / CONTROL)
    for seed in range(1, c.seeds):
        for name, arm in arms.items():
            other = _without_record(arm, folder / f"{name}.seed{seed}")
            start = dataclasses.replace(arm.warm_start, cache=str(Path(arm.warm_start.cache) / f"seed{seed}"))
            free[f"{name}.seed{seed}"] = dataclasses.replace(other, seed=config.seed + seed, warm_start=start)
    if c.replay:
        again = {CONTROL: replay_test.control_of(arms[first]), **arms}
        if config.rollout.kind == "random":  # all arms have the same completions as they are
            again = {CONTROL: again[CONTROL]}
        elif c.parallel:  # no time is compared: the baseline's own run will do
            del again[first]
        for name, arm in again.items():
            if config.rollout.kind == "sample":
                rollout = dataclasses.replace(arm.rollout, record=0, replay=str(folder / first))
                arm = dataclasses.replace(arm, rollout=rollout, eval=dataclasses.replace(arm.eval, every=0))
            if c.turns:
                arm = dataclasses.replace(arm, checkpoint=dataclasses.replace(arm.checkpoint, every=0))
            replays[name] = dataclasses.replace(arm, run_dir=str(folder / "replay" / name))
    return Plan(arms, free, replays)


def _without_record(arm: TrainConfig, folder: Path) -> TrainConfig:
    return dataclasses.replace(arm, run_dir=str(folder), rollout=dataclasses.replace(arm.rollout, record=0))
