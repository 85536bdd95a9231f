//! The choice of the path that computes a call.

use super::fused::fused;
use super::{FusedPlan, Outline, WeightsOutput};
use crate::device::DeviceFacts;
use crate::device::family::{FUSED, STAGED};
use crate::device::tuned::Pick;
use crate::kernel::{Algorithm, MatrixUnits};
use crate::tensor::{Error, Layout, Shape};

/// The path that computes a call, and its plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Choice {
    Fused(FusedPlan),
    Staged {
        /// Bytes of memory for the score matrix. It is 0 if the caller's weights tensor holds the
        /// scores.
        score_bytes: u64,
    },
}

/// Returns the layout of the score matrix, with rows padded to whole vectors.
pub(crate) fn score_matrix(shape: &Shape) -> Layout {
    let [b, h, i, j] = shape.weights();
    Layout::dense([b, h, i, j.next_multiple_of(4)])
}

/// Chooses the path of a call: the measured one for such calls, else the rules' choice.
pub(crate) fn choose(outline: &Outline, device: &DeviceFacts) -> Result<Choice, Error> {
    let measured = device.tuned.is_some().then(|| outline.class()).flatten();
    let pick = measured.and_then(|class| device.pick(class));
    // A call of the class may be too large for the measured plan.
    let picked = pick.and_then(|pick| choose_as(outline, &pick, &device.overridden(&pick)).ok());
    picked.map_or_else(|| choose_as(outline, &Pick::default(), device), Ok)
}

/// Chooses the path of a call as `pick` says, for the given device.
pub(super) fn choose_as(outline: &Outline, pick: &Pick, device: &DeviceFacts) -> Result<Choice, Error> {
    let fused_path = match outline.kernel_options.algorithm {
        Algorithm::Fused if outline.weights.is_some() => {
            let why = "only the staged path stores them; set `Algorithm::Auto`";
            return Err(Error::Unsupported { what: "attention weights on the fused path", why });
        }
        Algorithm::Fused if outline.scores => {
            let why = "only the staged path stores them; set `Algorithm::Auto`";
            return Err(Error::Unsupported { what: "scores on the fused path", why });
        }
        Algorithm::Staged if outline.keys.is_cache() => {
            let why = "only the fused path reads a cache; set `Algorithm::Auto`";
            return Err(Error::Unsupported { what: "a cache on the staged path", why });
        }
        Algorithm::Fused => true,
        Algorithm::Auto if outline.keys.is_cache() => true,
        Algorithm::Auto if outline.scores => false,
        Algorithm::Auto => {
            let fits = outline.weights.is_none() && outline.bindings <= device.max_storage_buffers as usize;
            fits && !device.lacks_both(FUSED) && !pick.staged
        }
        Algorithm::Staged => false,
    };
    let forms = if fused_path { FUSED } else { STAGED };
    if device.lacks_both(forms) {
        return Err(Error::Disabled { family: forms.of(device.software) });
    }
    if fused_path {
        return Ok(Choice::Fused(fused(outline, pick, device)?));
    }
    outline
        .kernel_options
        .refuse_batch_invariant("`batch_invariant` with weights, scores, or many mask tensors")?;
    if outline.kernel_options.matrix_units == MatrixUnits::Always {
        let why = "weights, scores and many mask tensors need the staged path, which has none; set `MatrixUnits::Auto`";
        return Err(Error::Unsupported { what: "matrix units for this call", why });
    }
    Ok(Choice::Staged { score_bytes: score_bytes(outline, device)? })
}

fn score_bytes(outline: &Outline, device: &DeviceFacts) -> Result<u64, Error> {
    if outline.weights == Some(WeightsOutput::Matrix) {
        return Ok(0);
    }
    let elements = score_matrix(&outline.shape).shape.iter().fold(1u64, |n, d| n.saturating_mul(*d as u64));
    // Kernels count elements in 32 bits, however much a device can bind.
    let limit = device.max_binding_bytes.min(4 * u64::from(u32::MAX));
    let bytes = elements.saturating_mul(4);
    if bytes > limit {
        return Err(Error::BindingLimit { tensor: "scores (scratch)", bytes, limit });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::plan::outline::{KeyLayout, Reach};
    use crate::kernel::KernelOptions;
    use crate::mask::{Alignment, DeviceMask};
    use crate::mask::{Pattern, PatternPart};
    use crate::tensor::DType;

    fn outline(shape: Shape, mask: &DeviceMask) -> Outline {
        let dtype = DType::F32;
        Outline {
            shape,
            dtype,
            keys: KeyLayout::Tensors { dtype, k: Layout::dense(shape.k()), v: Layout::dense(shape.v()) },
            reach: Reach::of(mask, shape.q_len, shape.kv_len, false),
            masked: true,
            simple: true,
            sinks: false,
            weights: None,
            scores: false,
            additive: false,
            listed: false,
            bindings: 4,
            kernel_options: KernelOptions::default(),
        }
    }

    fn splits(shape: Shape, mask: &DeviceMask, device: &DeviceFacts) -> usize {
        match choose(&outline(shape, mask), device).expect("within the limits") {
            Choice::Fused(plan) => plan.splits,
            Choice::Staged { .. } => panic!("staged"),
        }
    }

    /// One query and a long past: the number of splits depends on the keys that the query sees.
    #[test]
    fn splits_are_for_the_keys_in_reach() {
        let gpu = DeviceFacts::LEAST;
        let cpu = DeviceFacts { software: true, ..gpu.clone() };
        let shape = Shape { q_len: 1, kv_len: 65536, ..Shape::new(1, 1, 1, 64) };
        let window = || DeviceMask::none().window(255, 0);
        assert_eq!((splits(shape, &DeviceMask::causal(), &gpu), splits(shape, &window(), &gpu)), (128, 2));
        assert_eq!((splits(shape, &DeviceMask::causal(), &cpu), splits(shape, &window(), &cpu)), (16, 1));
        assert_eq!(splits(shape, &DeviceMask::none().window(1023, 0), &gpu), 8);
        assert_eq!(splits(shape, &DeviceMask::causal().window(1023, usize::MAX), &gpu), 8);
        assert_eq!(splits(shape, &DeviceMask::none().window(usize::MAX, 0), &gpu), 128);
        // With a top-left mask, a single query sees a single key.
        assert_eq!(splits(shape, &DeviceMask::causal_top_left(), &gpu), 1);
        // With an offset, the query may have any position. Keys on both sides count.
        let offset = |mask: DeviceMask<'static>| mask.aligned(Alignment::Offset(9));
        assert_eq!(splits(shape, &offset(DeviceMask::causal()), &gpu), 128);
        assert_eq!(splits(shape, &offset(DeviceMask::none().window(255, 256)), &gpu), 4);
        // A pattern of near keys is a window. A pattern with far keys is not.
        let pattern = |pattern| DeviceMask::none().pattern(pattern);
        let strided = |part| pattern(Pattern::Strided { stride: 255, part });
        assert_eq!(splits(shape, &pattern(Pattern::Local { block: 256 }), &gpu), 2);
        assert_eq!(splits(shape, &strided(PatternPart::Near), &gpu), 2);
        assert_eq!(splits(shape, &strided(PatternPart::Near).window(127, 0), &gpu), 1);
        for part in [PatternPart::Far, PatternPart::Both, PatternPart::ByHead] {
            assert_eq!(splits(shape, &strided(part), &gpu), 128);
        }
        assert_eq!(splits(shape, &pattern(Pattern::Dilated { dilation: 2 }).window(255, 0), &gpu), 2);
        // The last of four queries sees three keys further than the first.
        let four = Shape { q_len: 4, ..shape };
        assert_eq!(splits(four, &window(), &gpu), 2);
        assert_eq!(outline(four, &window()).reach.of_queries(4), 259);
    }

    /// More keys never need less memory, so scratch for the longest call is enough for shorter
    /// calls.
    #[test]
    fn splits_grow_with_the_keys() {
        for window in [None, Some(300), Some(5000)] {
            let mask = window.map_or(DeviceMask::causal(), |w| DeviceMask::causal().window(w, 0));
            for head_dim in [13, 64, 256] {
                for device in [DeviceFacts::LEAST, DeviceFacts { software: true, ..DeviceFacts::LEAST }] {
                    let lengths = (1..200).map(|n| 97 * n);
                    let of = |kv_len| {
                        splits(Shape { q_len: 2, kv_len, ..Shape::new(1, 4, 1, head_dim) }, &mask, &device)
                    };
                    assert!(lengths.map(of).is_sorted(), "{window:?} {head_dim} {device:?}");
                }
            }
        }
    }
}
