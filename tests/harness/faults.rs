//! Drivers that compile kernels wrongly.

use std::sync::{Arc, Mutex};

use wgpu_attention::tuning::Family;
use wgpu_attention::{Gpu, Pipelines, inspect};

/// The fault of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    Scaled,
    /// Neighbouring channels are exchanged.
    Swapped,
    NaN,
    DoesNotCompile,
    /// A correct result after a long loop.
    Slow,
}

/// The faults that make every result wrong.
pub const FAULTS: [Fault; 4] = [Fault::Scaled, Fault::Swapped, Fault::NaN, Fault::DoesNotCompile];

/// Families of operators, each with a fault. Wrong sorts, lengths and lists would give wrong
/// addresses, so these families use `DoesNotCompile`.
pub const OPERATORS: [(Family, Fault); 44] = [
    (Family::RadixSort, Fault::DoesNotCompile),
    (Family::TopK, Fault::Scaled),
    (Family::LogSoftmax, Fault::NaN),
    (Family::LogSoftmaxGradients, Fault::Scaled),
    (Family::Norms, Fault::Swapped),
    (Family::NormGradients, Fault::Scaled),
    (Family::Elementwise, Fault::Scaled),
    (Family::ElementwiseGradients, Fault::Swapped),
    (Family::Embeddings, Fault::Scaled),
    (Family::EmbeddingGradients, Fault::Scaled),
    (Family::MeanPools, Fault::Scaled),
    (Family::MeanPoolGradients, Fault::Scaled),
    (Family::CausalConvs, Fault::Scaled),
    (Family::CausalConvGradients, Fault::Scaled),
    (Family::WeightNorms, Fault::Scaled),
    (Family::WeightNormGradients, Fault::NaN),
    (Family::Rotations, Fault::Scaled),
    (Family::Positions, Fault::Scaled),
    (Family::QuantizedProducts, Fault::Scaled),
    (Family::Masks, Fault::Scaled),
    (Family::CacheLengths, Fault::DoesNotCompile),
    (Family::CacheCopies, Fault::Scaled),
    (Family::Hadamard, Fault::Scaled),
    (Family::ScoreOutputs, Fault::Scaled),
    (Family::AppendedKeys, Fault::Scaled),
    (Family::Merges, Fault::Scaled),
    (Family::MergeGradients, Fault::Scaled),
    (Family::LinearAttention, Fault::Scaled),
    (Family::LinearRecurrence, Fault::Scaled),
    (Family::LinearGradients, Fault::Scaled),
    (Family::Recurrence, Fault::Scaled),
    (Family::RecurrenceGradients, Fault::Scaled),
    (Family::Indexers, Fault::Scaled),
    (Family::IndexerGradients, Fault::Scaled),
    (Family::LocalAttention, Fault::Scaled),
    (Family::LocalGradients, Fault::Scaled),
    (Family::AbsentRows, Fault::Scaled),
    (Family::Lsh, Fault::Scaled),
    (Family::LshGradients, Fault::Scaled),
    (Family::SelectedKeys, Fault::DoesNotCompile),
    (Family::SelectedGradients, Fault::Scaled),
    (Family::NativeSparse, Fault::Scaled),
    (Family::Attentional, Fault::Scaled),
    (Family::AttentionalGradients, Fault::Scaled),
];

impl Fault {
    /// Returns `text` with faulty stores.
    pub fn in_text(self, text: &str) -> String {
        let (one, four, word) = match self {
            Fault::Scaled => ("given * 1.01", "given * 1.01", "given ^ 0x00400040u"),
            Fault::Swapped => ("given * 1.01", "given.yxwz", "given ^ 0x00400040u"),
            Fault::NaN => (
                "given + bitcast<f32>(o | 0x7fc00000u)",
                "given + bitcast<f32>(o | 0x7fc00000u)",
                "given | 0x7fc07fc0u",
            ),
            Fault::DoesNotCompile => return text.replacen("fn main(", "fn main(nothing, ", 1),
            Fault::Slow => return slow(text),
        };
        text.lines()
            .map(|line| {
                // Loops count by the contents of these tables.
                let kept = ["fn lse_store", "fn sequence_table_store", "fn chunks_store", "fn ranges_store"]
                    .iter()
                    .any(|name| line.starts_with(name));
                if kept || !line.starts_with("fn ") {
                    return line.to_string() + "\n";
                }
                let changed = |line: &str, ty: &str, value: &str| {
                    let (from, to) = (
                        format!("(o: u32, x: {ty}) {{"),
                        format!("(o: u32, given: {ty}) {{ let x = {value};"),
                    );
                    line.replacen(&from, &to, 1)
                };
                let line = changed(line, "f32", one);
                let line = changed(&line, "vec4<f32>", four);
                changed(&line, "u32", word) + "\n"
            })
            .collect()
    }
}

/// Returns `text` with a loop before the kernel's body.
fn slow(text: &str) -> String {
    let wait = "{\n    var counted = 0u;\n    for (var n = 0u; n < 200000u; n++) { counted = (counted ^ n) * 1664525u; }\n    \
                if counted == 1u { return; }\n";
    let Some(body) = text.find("fn main(").and_then(|main| Some(main + text[main..].find('{')?)) else {
        return text.to_string();
    };
    [&text[..body], wait, &text[body + 1..]].concat()
}

/// Returns `gpu` on a driver with the fault in every kernel of `family`, and the number of changed
/// kernels.
pub fn faulty(gpu: &Gpu, pipelines: &Pipelines, family: Family, fault: Fault) -> (Gpu, Arc<Mutex<usize>>) {
    let changed = Arc::new(Mutex::new(0));
    let count = changed.clone();
    let pipelines = inspect::rewritten(pipelines, move |families, text| {
        if !families.contains(&family) {
            return text.to_string();
        }
        let wrong = fault.in_text(text);
        *count.lock().expect("no panic") += usize::from(wrong != text);
        wrong
    });
    (Gpu::with_pipelines(gpu.queue().clone(), pipelines), changed)
}
