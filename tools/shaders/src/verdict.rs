//! The compilers' verdicts on kernels.

use std::fmt;

use crate::gpus::GPUS;
use crate::mesa::Statistics;

/// The compilers and validators.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Compiler {
    /// naga's validator; then its writers.
    Naga,
    NagaSpirv,
    NagaMsl,
    NagaHlsl,
    /// The checks of `msl.rs`.
    Metal,
    /// A C++ compiler, on naga's MSL.
    Cpp,
    SpirvVal,
    Tint,
    Dxc,
    Fxc,
    /// Mesa's driver of a GPU, by its number among [`GPUS`].
    Mesa(usize),
}

impl Compiler {
    pub fn all() -> Vec<Self> {
        use Compiler::*;
        let first = [Naga, NagaSpirv, NagaMsl, NagaHlsl, Metal, Cpp, SpirvVal, Tint, Dxc, Fxc];
        first.into_iter().chain((0..GPUS.len()).map(Mesa)).collect()
    }
}

impl fmt::Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Compiler::Naga => f.write_str("naga"),
            Compiler::NagaSpirv => f.write_str("naga-spirv"),
            Compiler::NagaMsl => f.write_str("naga-msl"),
            Compiler::NagaHlsl => f.write_str("naga-hlsl"),
            Compiler::Metal => f.write_str("metal"),
            Compiler::Cpp => f.write_str("c++"),
            Compiler::SpirvVal => f.write_str("spirv-val"),
            Compiler::Tint => f.write_str("tint"),
            Compiler::Dxc => f.write_str("dxc"),
            Compiler::Fxc => f.write_str("fxc"),
            Compiler::Mesa(n) => f.write_str(GPUS[*n].name),
        }
    }
}

/// The numbers of FXC's listing of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Listing {
    /// Processor time of the compiler.
    pub seconds: f64,
    pub instructions: u64,
    /// Registers of four 32-bit words.
    pub registers: u64,
    /// Registers of arrays that are indexed, in memory.
    pub arrays: u64,
}

/// A compiler's verdict on a kernel.
#[derive(Clone, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
pub enum Verdict {
    Accepted,
    Compiled(Box<Statistics>),
    /// Compiled by FXC.
    Listed(Listing),
    /// Accepted by `msl.rs`, with this number of calls of `workgroupUniformLoad`. Metal's compiler
    /// on an M1 moved such a load in front of its barrier (wgpu 4500).
    UniformLoads(u64),
    /// Not compiled: the kernel does not suit the compiler.
    Unsuited,
    /// Not compiled. Other kernels cover its combinations of two or three values of axes, or it is
    /// in another share.
    Covered,
    Rejected(String),
}

impl Verdict {
    pub fn statistics(&self) -> Option<&Statistics> {
        if let Verdict::Compiled(statistics) = self { Some(statistics) } else { None }
    }

    pub fn is_accepted(&self) -> bool {
        !matches!(self, Verdict::Unsuited | Verdict::Covered | Verdict::Rejected(_))
    }

    pub fn is_asked(&self) -> bool {
        !matches!(self, Verdict::Unsuited | Verdict::Covered)
    }

    /// Returns the faults that need an explanation: the kind and the amount.
    pub fn faults(&self) -> Vec<(&'static str, u64)> {
        match self {
            Verdict::Rejected(_) => vec![("rejected", 1)],
            Verdict::UniformLoads(n) => vec![("uniform_loads", *n)],
            Verdict::Compiled(s) => {
                let scalar_spills = s.scalar_spills.unwrap_or(0);
                let memory = s.memory.unwrap_or(0);
                let all = [("spills", s.spills), ("scalar_spills", scalar_spills), ("memory", memory)];
                all.into_iter().filter(|(_, n)| *n > 0).collect()
            }
            _ => Vec::new(),
        }
    }
}
