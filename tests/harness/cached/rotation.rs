//! Steps of a cache that rotates keys as it appends them, each sequence at different positions. The
//! queries are rotated at the same positions.

use wgpu_attention::cache::{Append, CacheLayout, Tokens};
use wgpu_attention::position::{Positions, Rope, RopeConfig, Rotate, Rotation, RowPositions};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance, compare};
use wgpu_attention::reference::{self, Options, Real, widen};
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Forward, Mask, Scratch, ScratchSize, Shape, TensorView,
};

use crate::harness::device::Profile;
use crate::harness::random::Rng;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
pub const DIM: usize = 20;
const STEPS: [[usize; 2]; 5] = [[7, 3], [1, 1], [1, 0], [5, 9], [1, 1]];

/// Rotates queries and keys of a sequence at their positions, then attends to all keys.
fn truth<R: Real>(q: &[f32], k: &[f32], v: &[f32], len: usize, config: &RopeConfig) -> Vec<f64> {
    let rotated = |x: &[f32], heads| {
        reference::rotate::<R>(&widen::<R>(x), [1, heads, len, DIM], config, RowPositions::Start(0))
            .expect("a rotation")
    };
    let shape = Shape { kv_heads: KV_HEADS, ..Shape::new(1, HEADS, len, DIM) };
    let options = Options::new().mask(Mask::causal());
    let (q, k) = (rotated(q, HEADS), rotated(k, KV_HEADS));
    let out = reference::attention::<R>(&q, &k, &widen::<R>(v), shape, &options).expect("a shape").out;
    out.into_iter().map(Real::f64).collect()
}

/// Runs steps of two sequences of different lengths. Returns the largest error over tolerance.
pub async fn rotated_steps(
    profile: &Profile,
    config: RopeConfig,
    layout: CacheLayout,
) -> Result<f64, String> {
    let gpu = &profile.gpu;
    let mut rng = Rng::named(&format!("{config:?} {layout:?}"));
    let rope = Rope::new(gpu.device(), config).expect("a rope");
    let positions = Positions::with_pipelines(gpu.pipelines());
    let attention = Attention::with_pipelines(gpu.pipelines(), Config::new(HEADS, DIM).kv_heads(KV_HEADS))
        .expect("a config");
    let of_cache = CacheConfig::new(KV_HEADS, DIM, 64).batch(2).layout(layout);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), of_cache).expect("a cache");
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    // `all`: every row so far by sequence and head. `outs`: outputs by sequence, head and row.
    let mut all = [HEADS, KV_HEADS, KV_HEADS].map(|heads| vec![Vec::new(); 2 * heads]);
    let mut outs = vec![Vec::<f64>::new(); 2 * HEADS];
    for counts in STEPS {
        let rows = counts[0].max(counts[1]);
        let step = [HEADS, KV_HEADS, KV_HEADS].map(|heads| rng.normals(2 * heads * rows * DIM));
        for (all, step) in all.iter_mut().zip(&step) {
            let heads = all.len() / 2;
            for (n, (all, step)) in all.iter_mut().zip(step.chunks(rows * DIM)).enumerate() {
                all.extend(&step[..counts[n / heads] * DIM]);
            }
        }
        let [q, k, v] = step.each_ref().map(|x| gpu.upload(x).expect("upload"));
        let out = gpu.buffer(2 * HEADS * rows * DIM * 4).expect("out");
        let view = |buffer, heads| TensorView::new(buffer, DType::F32, [2, heads, rows, DIM]);
        let queries = view(&q, HEADS);
        gpu.submit(|encoder| {
            cache.advance(encoder, Tokens::Each(&counts))?;
            let append = Append::new(view(&k, KV_HEADS), view(&v, KV_HEADS)).rope(&rope);
            cache.append(encoder, 0, &append)?;
            let at = RowPositions::Tensor(cache.starts());
            positions.rotate(encoder, &Rotate::new(queries, Rotation::Rope(&rope), at))?;
            let call = Forward::with_cache(queries, &cache, view(&out, HEADS)).mask(Mask::causal());
            attention.forward(encoder, &call, &mut scratch)
        })
        .map_err(|e| format!("refused: {e}"))?;
        let got: Vec<f32> =
            gpu.download_async(&out, 2 * HEADS * rows * DIM).await.map_err(|e| e.to_string())?;
        for (n, (all, got)) in outs.iter_mut().zip(got.chunks(rows * DIM)).enumerate() {
            all.extend(widen::<f64>(&got[..counts[n / HEADS] * DIM]));
        }
    }
    let mut worst = 0.0f64;
    for s in 0..2 {
        let of = |n: usize, heads: usize| all[n][s * heads..][..heads].concat();
        let (q, k, v) = (of(0, HEADS), of(1, KV_HEADS), of(2, KV_HEADS));
        let len = k.len() / KV_HEADS / DIM;
        let want = truth::<f64>(&q, &k, &v, len, &config);
        let naive = truth::<f32>(&q, &k, &v, len, &config);
        let tolerance = Tolerance::from_naive(&naive, &want, 1.0, EPSILON_F32);
        let got = outs[s * HEADS..][..HEADS].concat();
        let difference = compare(&got, &want, tolerance).map_err(|e| e.to_string())?;
        worst = worst.max(difference.absolute / tolerance.absolute);
    }
    Ok(worst)
}
