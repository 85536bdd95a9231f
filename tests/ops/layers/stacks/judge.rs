//! Tolerances for gradients of stacks.

use wgpu_attention::DType;
use wgpu_attention::reference::compare::{EPSILON_BF16, EPSILON_F16, EPSILON_F32, Tolerance, max_error};

use crate::harness::case::{largest, widened};
use crate::harness::{Judged, Rng, stored};

/// Returns the smallest relative step of a type.
pub fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => EPSILON_F16,
        DType::BF16 => EPSILON_BF16,
        _ => EPSILON_F32,
    }
}

/// The gradients of a stack, with all tensors in the same order.
pub struct Gradients<'a> {
    /// The name of each tensor, and the earlier contents of its gradient's place.
    pub before: Vec<(String, Vec<f32>)>,
    pub exact: &'a [Vec<f64>],
    pub naive: &'a [Vec<f32>],
    /// The type of activations; below, of gradients.
    pub dtype: DType,
    pub gradient: DType,
    /// True if the call adds to the earlier contents.
    pub accumulates: bool,
}

impl Gradients<'_> {
    /// Returns the largest error over tolerance.
    pub fn judge(self, got: &[Vec<f64>]) -> Result<f64, String> {
        let Gradients { before, exact, naive, dtype, gradient, accumulates } = self;
        if [before.len(), naive.len(), got.len()] != [exact.len(); 3] {
            return Err(format!("{} gradients, not {}", got.len(), exact.len()));
        }
        // Gradients of keys' biases are 0 except for rounding, so the largest of all terms counts.
        let magnitude = largest(exact.iter().flatten().copied());
        // A norm of nearly equal features amplifies rounding. The amplified error reaches all
        // gradients before the norm, and some of them by luck less in the naive computation. So
        // each gradient may be off by the worst relative error of all.
        let share =
            exact.iter().zip(naive).filter(|(exact, _)| largest(exact.iter().copied()) > 1e-3 * magnitude);
        let share = share
            .map(|(exact, naive)| {
                max_error(&widened(naive, gradient), exact) / largest(exact.iter().copied())
            })
            .fold(0.0, f64::max);
        let mut worst: f64 = 0.0;
        for ((((name, before), got), exact), naive) in before.into_iter().zip(got).zip(exact).zip(naive) {
            let before: Vec<f32> = match accumulates {
                true => stored(&before, gradient),
                false => vec![0.0; before.len()],
            };
            let want: Vec<f64> = exact.iter().zip(&before).map(|(g, b)| g + f64::from(*b)).collect();
            let naive: Vec<f32> = naive.iter().zip(&before).map(|(g, b)| g + b).collect();
            let own = Tolerance::gradient(&widened(&naive, gradient), &want, magnitude, epsilon(dtype));
            let of_stack = 3.0 * share * largest(exact.iter().copied());
            let tolerance = Tolerance { absolute: own.absolute.max(of_stack) };
            let judged = Judged { want, tolerance }.judge(got);
            worst = worst.max(judged.map_err(|e| format!("{name}: {e}"))?);
        }
        Ok(worst)
    }
}

/// Compares the gradient of an element of each tensor with central differences of the loss.
/// `tensors` returns all tensors of a stack.
pub fn expect_slopes<S: Clone>(
    name: &str,
    stack: &S,
    rng: &mut Rng,
    loss: impl Fn(&S) -> f64,
    gradients: impl Fn(&S) -> Vec<Vec<f64>>,
    tensors: impl Fn(&mut S, &mut dyn FnMut(&mut Vec<f32>)),
) {
    let got = gradients(stack);
    // A step that f32 represents exactly.
    let h = 1.0 / 4096.0;
    let scale = largest(got.iter().flatten().copied());
    for (t, gradient) in got.iter().enumerate() {
        let e = rng.below(gradient.len());
        let at = |by: f32| {
            let mut moved = stack.clone();
            let mut n = 0;
            tensors(&mut moved, &mut |tensor| {
                if n == t {
                    assert_eq!(tensor.len(), gradient.len(), "{name}, tensor {t}");
                    tensor[e] = (tensor[e] * 4096.0).round() / 4096.0 + by;
                }
                n += 1;
            });
            assert_eq!(n, got.len(), "{name}: gradients of other tensors");
            (loss(&moved), gradients(&moved)[t][e])
        };
        let slope = (at(h).0 - at(-h).0) / (2.0 * f64::from(h));
        let want = at(0.0).1;
        assert!((slope - want).abs() < 1e-4 * scale, "{name}, tensor {t}, {e}: {slope} and {want}");
    }
}
