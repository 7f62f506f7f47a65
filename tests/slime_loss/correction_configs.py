"""Every objective and correction, and the combinations in which they meet."""

from dataclasses import replace

from slime_loss import PolicyLossConfig

OBJECTIVES = {
    "ppo": PolicyLossConfig(eps_clip=0.1, eps_clip_high=0.3, eps_clip_c=1.3),
    "gspo": PolicyLossConfig(policy_objective="gspo", eps_clip=0.05, eps_clip_c=1.4),
    "cispo": PolicyLossConfig(policy_objective="cispo", eps_clip=0.4, eps_clip_high=0.3),
    "reinforce": PolicyLossConfig(policy_objective="reinforce"),
}
TIS = {
    f"{mode} {level}": PolicyLossConfig(
        use_tis=True, tis_mode=mode, tis_level=level, tis_clip=1.3, tis_clip_low=0.6
    )
    for mode in ("truncate", "icepop")
    for level in ("token", "sequence", "geometric")
}
RS = {
    f"rs {level}": PolicyLossConfig(use_rs=True, rs_level=level, rs_upper_bound=1.4)
    for level in ("token", "sequence", "geometric")
}
VETO = {
    "veto": PolicyLossConfig(use_rs=True, rs_upper_bound=100.0, rs_veto_threshold=0.4),
    "veto geometric": PolicyLossConfig(
        use_rs=True, rs_level="geometric", rs_lower_bound=0.5, rs_veto_threshold=0.3
    ),
    "veto token": PolicyLossConfig(use_rs=True, rs_upper_bound=1.5, rs_veto_threshold=0.3),
}
OPSM = {"opsm": PolicyLossConfig(use_opsm=True, opsm_delta=0.05)}
CORRECTIONS = TIS | RS | VETO | OPSM


def _joined(*configs: PolicyLossConfig) -> PolicyLossConfig:
    default = PolicyLossConfig()
    changed = {
        name: value
        for config in configs
        for name, value in vars(config).items()
        if value != getattr(default, name)
    }
    return replace(default, **changed)


MEETING = {
    "rs token, tis geometric": _joined(RS["rs token"], TIS["truncate geometric"]),
    "rs sequence, tis sequence": _joined(RS["rs sequence"], TIS["icepop sequence"]),
    "rs token, opsm": _joined(RS["rs token"], OPSM["opsm"]),
    "opsm of the engine": PolicyLossConfig(use_opsm=True, use_rollout_logprobs=True),
    "everything": _joined(
        VETO["veto token"],
        TIS["truncate sequence"],
        OPSM["opsm"],
        PolicyLossConfig(
            use_kl_loss=True, kl_loss_coef=0.2, kl_loss_type="k3", use_unbiased_kl=True
        ),
        PolicyLossConfig(entropy_coef=0.1),
    ),
}
ALL = OBJECTIVES | {
    f"{objective}, {correction}": _joined(OBJECTIVES[objective], config)
    for objective in OBJECTIVES
    for correction, config in (CORRECTIONS | MEETING).items()
}
