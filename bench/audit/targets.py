"""What the hardware gives a kernel: registers, local memory, waves."""

from dataclasses import dataclass

# A lane's share of a SIMD's (an SM quarter's) register file, and the step that registers are given in.
REGISTERS_PER_LANE = 512
REGISTER_STEP = 8
SIMDS = 4
KIB = 1024


@dataclass(frozen=True)
class Target:
    """One GPU architecture.

    Shared memory is AMD's LDS and CUDA's shared memory: bytes that one workgroup may use, bytes of a
    compute unit, and bytes of it that the driver keeps for each workgroup.
    """

    arch: str
    warp_size: int
    max_waves: int
    shared_limit: int
    shared_capacity: int
    shared_reserved: int
    matrix_layout: str

    @property
    def is_amd(self) -> bool:
        """True for ROCm, false for CUDA."""
        return self.arch.startswith("gfx")

    def occupancy(self, registers: int, shared: int, num_warps: int) -> float:
        """Waves per SIMD (warps per SM quarter) that registers and shared memory leave room for.

        Args:
            registers: registers of a lane, on AMD VGPR and AGPR together (one file on CDNA2 and later).
            shared: bytes of shared memory of a workgroup.
            num_warps: waves of a workgroup.
        """
        rounded = max(-(-registers // REGISTER_STEP), 1) * REGISTER_STEP
        waves = min(self.max_waves, REGISTERS_PER_LANE // rounded)
        groups = waves * SIMDS // num_warps
        if shared:
            groups = min(groups, self.shared_capacity // (shared + self.shared_reserved))
        return groups * num_warps / SIMDS


def _cdna(arch: str, lds: int) -> Target:
    return Target(arch, 64, 8, lds * KIB, lds * KIB, 0, "amd_mfma")


TARGETS = {
    target.arch: target
    for target in (
        _cdna("gfx90a", 64),
        _cdna("gfx942", 64),
        _cdna("gfx950", 160),
        Target("sm90", 32, 16, 227 * KIB, 228 * KIB, 1 * KIB, "nvidia_mma"),
    )
}
