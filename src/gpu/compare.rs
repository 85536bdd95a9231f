//! Compares a mask on the device with a mask on the host, pair by pair.

use super::Gpu;
use super::upload::storage_buffer;
use crate::attention::reference::mask::pair_answers;
use crate::kernel::BindingCache;
use crate::mask::{DeviceMask, HostMask, ask_mask};
use crate::tensor::{DType, Error, Shape, TensorView};

/// Pairs that are compared.
const PAIRS: usize = 4096;
/// Answers for each pair.
const ANSWERS: usize = 3;

/// Marsaglia 2003, "Xorshift RNGs".
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Returns a score from −8 to 8, the usual range of scores.
    fn score(&mut self) -> f32 {
        (self.next() % (1 << 20)) as f32 / (1 << 16) as f32 - 8.0
    }
}

impl Gpu {
    /// Compares `device` with `host` at 4096 random pairs of `shape`, with scores from −8 to 8. Use
    /// it to test that a [`ScoreMod`](crate::mask::ScoreMod) or [`MaskMod`](crate::mask::MaskMod)
    /// equals the host's closure. It compares which pairs are visible, their scores, and the
    /// derivatives of the scores. Returns the largest difference, relative for values beyond 1.
    ///
    /// ```no_run
    /// use wgpu_attention::{Gpu, Mask, Shape};
    /// use wgpu_attention::mask::{At, ScoreMod};
    /// let gpu = Gpu::new()?;
    /// let text = "fn score_mod(score: f32, at: At) -> f32 { return score - 0.1 * f32(abs(at.position - i32(at.key))); }";
    /// let closure = |score: f64, at: &At| score - 0.1 * f64::from((at.position - at.key as i32).abs());
    /// let device = Mask::causal().score_mod(ScoreMod::new(text)?);
    /// let host = Mask::causal().score_fn(&closure);
    /// gpu.compare_masks(&device, &host, Shape::new(2, 8, 512, 64), 1e-5)?;
    /// # Ok::<(), wgpu_attention::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Mod`] for the first pair that differs by more than `tolerance`. Errors of a call
    /// with such a mask.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn compare_masks(
        &self,
        device: &DeviceMask,
        host: &HostMask,
        shape: Shape,
        tolerance: f64,
    ) -> Result<f64, Error> {
        pollster::block_on(self.compare_masks_async(device, host, shape, tolerance))
    }

    /// The async variant of [`compare_masks`](Self::compare_masks).
    ///
    /// # Errors
    /// As [`compare_masks`](Self::compare_masks).
    pub async fn compare_masks_async(
        &self,
        device: &DeviceMask<'_>,
        host: &HostMask<'_>,
        shape: Shape,
        tolerance: f64,
    ) -> Result<f64, Error> {
        let facts = &self.pipelines.facts();
        shape.check()?;
        shape.check_lengths()?;
        device.check(&shape, facts)?;
        host.check(shape)?;
        let random = &mut Random(0x2545_f491_4f6c_dd1d);
        let mut indices = Vec::with_capacity(PAIRS);
        let mut scores = Vec::with_capacity(PAIRS);
        for _ in 0..PAIRS {
            indices.push(shape.weights().map(|n| random.below(n)));
            scores.push(random.score());
        }
        let words: Vec<u32> = indices.iter().flatten().map(|n| *n as u32).collect();
        let (pairs, given) = (self.upload(&words)?, self.upload(&scores)?);
        let answers = storage_buffer(&self.device, 4 * ANSWERS * PAIRS)?;
        let tensors = [
            TensorView::new(&pairs, DType::U32, [1, 1, PAIRS, 4]),
            TensorView::new(&given, DType::F32, [1, 1, 1, PAIRS]),
            TensorView::new(&answers, DType::F32, [1, 1, PAIRS, ANSWERS]),
        ];
        let derivative = device.mods().check_slope().is_ok();
        let call = ask_mask::call(device, derivative, &shape, tensors, facts);
        let call = self.pipelines.bind("attention.ask_mask", &[call], &BindingCache::default())?;
        self.submit(|encoder| {
            call.record(encoder);
            Ok(())
        })?;
        let got: Vec<f32> = self.download_async(&answers, ANSWERS * PAIRS).await?;

        let mut worst = 0f64;
        for ((index, score), got) in indices.iter().zip(&scores).zip(got.chunks_exact(ANSWERS)) {
            let (at, want) = pair_answers(host, &shape, *index, f64::from(*score));
            let differs = |function, of: &str, got: f64, want: f64| {
                let message =
                    format!("{of} at {at:?}, score {score}, is {got} on the device and {want} on the host");
                Err(Error::Mod { function, message })
            };
            if (got[0] != 0.0) != want.is_some() {
                let want = f64::from(u8::from(want.is_some()));
                return differs("mask_mod", "the visibility of the pair", f64::from(got[0]), want);
            }
            let Some(want) = want else { continue };
            let names = ["the score", "its derivative"];
            for ((got, want), name) in got[1..].iter().zip(want).zip(names).take(1 + usize::from(derivative))
            {
                let got = f64::from(*got);
                // Equal infinities and two NaN have no difference.
                let alike = got == want || got.is_nan() && want.is_nan();
                let off = if alike { 0.0 } else { (got - want).abs() / want.abs().max(1.0) };
                if off.is_nan() || off > tolerance {
                    return differs("score_mod", name, got, want);
                }
                worst = worst.max(off);
                // Nothing reads the derivative of a hidden pair.
                if want == f64::NEG_INFINITY {
                    break;
                }
            }
        }
        Ok(worst)
    }
}
