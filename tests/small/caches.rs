//! Caches of every storage and layout are appended to, read by attention, rewound and forked.

use wgpu_attention::cache::{CacheLayout, CacheStorage, ScaleGroup};
use wgpu_attention::tuning::Target;
use wgpu_attention::{DType, Error};

use super::Work;
use crate::harness::{Ask, Bed, Count, Data, HostData, Kind, Profile, Rules};

/// A cache and the steps that run on it. After each step attention reads every layer.
pub struct CacheCase {
    kind: Kind,
    data: Data,
    form: Target,
    dtype: DType,
    splits: Option<usize>,
    rules: Rules,
    steps: Vec<Step>,
}

enum Step {
    Grow(Count),
    Rewind(Count),
    /// Copies the first sequence over the second, too.
    Fork,
}

impl CacheCase {
    /// Returns the largest error over tolerance.
    pub async fn run(&self, profile: &'static Profile) -> Result<f64, String> {
        let mut bed = Bed::new(profile, self.kind, self.data, 5);
        bed.dtype = self.dtype;
        let mut worst = 0.0f64;
        for (n, step) in self.steps.iter().enumerate() {
            let at = |e: String| format!("step {n}: {e}");
            take(&mut bed, step).map_err(|e| at(format!("refused: {e}")))?;
            for layer in 0..self.kind.layers {
                let ask = Ask {
                    layer,
                    dtype: self.dtype,
                    splits: self.splits,
                    rows: (bed.advanced == 0).then_some(2),
                    ..Ask::new(self.form, &self.rules)
                };
                worst = worst.max(bed.ask_async(&ask).await.map_err(at)?);
            }
            bed.check_book_async().await.map_err(at)?;
        }
        Ok(worst)
    }
}

fn take(bed: &mut Bed, step: &Step) -> Result<(), Error> {
    match step {
        Step::Grow(count) => bed.grow(count),
        Step::Rewind(count) => bed.rewind(count),
        Step::Fork => {
            bed.fork(0, 1)?;
            bed.advanced = 0;
            bed.sequences.iter_mut().for_each(|s| s.fresh = 0);
            bed.flush();
            Ok(())
        }
    }
}

pub fn cases(_: &'static Profile) -> Vec<(String, Work)> {
    let causal = Rules { causal: true, ..Default::default() };
    let grow = |counts: &[usize]| Step::Grow(Count::Each(counts.to_vec()));
    let all = |n| Step::Grow(Count::All(n));
    let plain = |kind, form, steps| CacheCase {
        kind,
        data: Data::Lossless,
        form,
        dtype: DType::F32,
        splits: None,
        rules: causal.clone(),
        steps,
    };
    let wide = |kind| Kind { head_dim: 40, value_dim: 24, ..kind };
    let multiplied = |kind| Kind { head_dim: 64, value_dim: 32, hadamard: Some(32), ..kind };
    let (contiguous, ring) = (CacheLayout::Contiguous, CacheLayout::Ring { sink_tokens: 3 });
    let paged = CacheLayout::Paged { page: 16, pages: 12 };
    let on_device = |counts: &[u32]| Count::Device { counts: counts.to_vec(), most: 4 };
    let slopes = HostData::of([1, 4, 1, 1], |[_, h, ..]| 0.5 - 0.25 * h as f32);
    let cases = [
        (
            "contiguous, F32, two layers",
            plain(
                Kind { layers: 2, ..Kind::new(CacheStorage::F32, contiguous, 80) },
                Target::Gpu,
                vec![all(5), all(1), all(1), Step::Rewind(Count::All(2)), grow(&[3, 1])],
            ),
        ),
        (
            "ring, F16, overwritten",
            plain(Kind::new(CacheStorage::F16, ring, 24), Target::Software, vec![all(20), all(1), all(7)]),
        ),
        (
            "contiguous, BF16 with a Walsh-Hadamard product, bf16 tensors",
            CacheCase {
                data: Data::Random,
                dtype: DType::BF16,
                ..plain(
                    multiplied(Kind::new(CacheStorage::BF16, contiguous, 80)),
                    Target::Gpu,
                    vec![all(5), all(1)],
                )
            },
        ),
        (
            "pages, Q8 in groups, splits, forked",
            CacheCase {
                splits: Some(3),
                ..plain(
                    wide(Kind::new(CacheStorage::Q8(ScaleGroup::Of(32)), paged, 80)),
                    Target::Software,
                    vec![grow(&[21, 5]), Step::Fork, all(1), grow(&[0, 3])],
                )
            },
        ),
        (
            "contiguous, Q4 in rows, rounded, lengths on the device",
            CacheCase {
                data: Data::Random,
                ..plain(
                    Kind::new(CacheStorage::Q4(ScaleGroup::Row), contiguous, 80),
                    Target::Gpu,
                    vec![
                        grow(&[30, 17]),
                        Step::Grow(on_device(&[1, 4])),
                        Step::Rewind(on_device(&[3, 0])),
                        all(2),
                    ],
                )
            },
        ),
        (
            "pages, Q8 in rows, f16 tensors",
            CacheCase {
                dtype: DType::F16,
                ..plain(
                    wide(Kind::new(CacheStorage::Q8(ScaleGroup::Row), paged, 80)),
                    Target::Gpu,
                    vec![all(18), all(1)],
                )
            },
        ),
        (
            "pages, Q4_0 with a Walsh-Hadamard product, f16 tensors",
            CacheCase {
                data: Data::Random,
                dtype: DType::F16,
                ..plain(
                    multiplied(Kind::new(CacheStorage::Q4_0, paged, 80)),
                    Target::Gpu,
                    vec![all(18), all(1)],
                )
            },
        ),
        (
            "ring, Q4 in groups, window and alibi, rounded",
            CacheCase {
                data: Data::Random,
                rules: Rules { window: Some([9, 0]), slopes: Some(slopes), ..causal.clone() },
                ..plain(
                    wide(Kind::new(CacheStorage::Q4(ScaleGroup::Of(32)), ring, 24)),
                    Target::Software,
                    vec![all(22), all(3), all(1)],
                )
            },
        ),
    ];
    cases.map(|(name, case)| (format!("cache: {name}"), Work::Cache(Box::new(case)))).into()
}
