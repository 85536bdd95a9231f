//! Selected keys in caches: the result is that of the rows that the cache gives back.

use wgpu_attention::cache::{Append, CacheLayout, CacheRead, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::reference::{self, Options, SelectedKeys, widen};
use wgpu_attention::selected::{SelectedAttention, SelectedConfig, SelectedForward};
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    Cache, CacheConfig, Config, DType, Forward, HostTensor, KernelOptions, Mask, Scratch, Shape, TensorView,
};

use crate::harness::case::{Judged, largest, widened};
use crate::harness::device::full;
use crate::harness::{FORMS, Report, Rng, rest};

const BATCH: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIMS: [usize; 2] = [32, 64];
const CAPACITY: usize = 160;
const WINDOW: usize = 3;

/// Tokens of each sequence in each call: a prompt, single tokens and drafts.
const STEPS: [[usize; BATCH]; 4] = [[70, 33], [1, 1], [3, 1], [1, 0]];

/// Runs all calls. Returns the largest error over tolerance.
fn outcome(
    storage: CacheStorage,
    layout: CacheLayout,
    form: Target,
    [list_heads, count, block]: [usize; 3],
) -> Result<f64, String> {
    let profile = full();
    profile.tidy();
    let gpu = &profile.gpu;
    let refused = |e: wgpu_attention::Error| format!("refused: {e}");
    let [head_dim, value_dim] = DIMS;
    let config = CacheConfig::new(KV_HEADS, head_dim, CAPACITY).value_dim(value_dim).batch(BATCH);
    // ggml's formats are tested with a Walsh–Hadamard product.
    let hadamard = matches!(storage, CacheStorage::Q4_0 | CacheStorage::Q8_0).then_some(32);
    let config = config.storage(storage).layout(layout).hadamard(hadamard);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config).map_err(refused)?;
    let options = KernelOptions::new().target(form);
    let config = Config::new(HEADS, head_dim).kv_heads(KV_HEADS).value_dim(value_dim).kernel_options(options);
    let config = SelectedConfig::new(config).block(block).window(WINDOW);
    let operator = SelectedAttention::with_pipelines(gpu.pipelines(), config).map_err(refused)?;
    let mut rng = Rng::named("selected keys in caches");
    let (mut lengths, mut worst) = ([0; BATCH], 0f64);
    for step in STEPS {
        let rows = *step.iter().max().expect("sequences");
        let shape = |heads, dim| [BATCH, heads, rows, dim];
        let sizes = [shape(KV_HEADS, head_dim), shape(KV_HEADS, value_dim), shape(HEADS, head_dim)];
        let [k, v, q] = sizes.map(|shape| rng.normals(shape.iter().product()));
        let [k_at, v_at, q_at] = [&k, &v, &q].map(|x| gpu.upload(x).expect("room"));
        let longest = lengths.iter().zip(step).map(|(a, b)| a + b).max().expect("sequences");
        let index = |_| if rng.chance(0.1) { u32::MAX } else { rng.below(longest.div_ceil(block)) as u32 };
        let indices: Vec<u32> = (0..BATCH * list_heads * rows * count).map(index).collect();
        let lists = [BATCH, list_heads, rows, count];
        let indices_at = gpu.upload(&indices).expect("room");
        let view = |buffer, shape| TensorView::new(buffer, DType::F32, shape);
        let out_shape = shape(HEADS, value_dim);
        let out_at = gpu.buffer(4 * out_shape.iter().product::<usize>()).expect("room");
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        cache.advance(&mut encoder, Tokens::Each(&step)).map_err(refused)?;
        let append = Append::new(view(&k_at, sizes[0]), view(&v_at, sizes[1]));
        cache.append(&mut encoder, 0, &append).map_err(refused)?;
        let forward = Forward::with_cache(view(&q_at, sizes[2]), &cache, view(&out_at, out_shape));
        let indices_view = TensorView::new(&indices_at, DType::U32, lists);
        let call = SelectedForward::new(forward.mask(Mask::causal()), indices_view);
        let size = operator.scratch_size(&call).map_err(refused)?;
        let mut scratch = Scratch::new(gpu.device(), size).map_err(refused)?;
        operator.forward(&mut encoder, &call, &mut scratch).map_err(refused)?;
        let of = |dim| [BATCH, KV_HEADS, CAPACITY, dim];
        let [stored_k, stored_v] =
            [head_dim, value_dim].map(|dim| gpu.buffer(4 * of(dim).iter().product::<usize>()).expect("room"));
        let read = CacheRead::new(view(&stored_k, of(head_dim)), view(&stored_v, of(value_dim)));
        cache.read(&mut encoder, 0, &read).map_err(refused)?;
        gpu.queue().submit([encoder.finish()]);
        let got: Vec<f32> = gpu.download(&out_at, out_shape.iter().product()).map_err(refused)?;
        let [stored_k, stored_v]: [Vec<f32>; 2] = [(stored_k, head_dim), (stored_v, value_dim)]
            .map(|(buffer, dim)| gpu.download(&buffer, of(dim).iter().product()).expect("rows"));
        for b in 0..BATCH {
            lengths[b] += step[b];
            let (queries, keys) = (step[b], lengths[b]);
            let rows_of = |b: usize, heads: usize, x: &[f32], length: usize, dim: usize, wanted: usize| {
                let head = move |h: usize| (b * heads + h) * length * dim;
                (0..heads).flat_map(|h| x[head(h)..head(h) + wanted * dim].to_vec()).collect::<Vec<_>>()
            };
            let got_rows = rows_of(b, HEADS, &got, rows, value_dim, rows);
            // Rows past a sequence's tokens are zeros.
            let past = |row: usize| row % rows >= queries;
            let zeros =
                got_rows.chunks(value_dim).enumerate().all(|(n, x)| !past(n) || x.iter().all(|x| *x == 0.0));
            if !zeros {
                return Err(format!("sequence {b} has results past its tokens"));
            }
            if queries == 0 {
                continue;
            }
            let shape = Shape {
                batch: 1,
                heads: HEADS,
                kv_heads: KV_HEADS,
                q_len: queries,
                kv_len: keys,
                head_dim,
                value_dim,
            };
            let list: Vec<u32> = (0..list_heads)
                .flat_map(|g| indices[(b * list_heads + g) * rows * count..][..queries * count].to_vec())
                .collect();
            let names = SelectedKeys {
                indices: HostTensor::new(&list, [1, list_heads, queries, count]),
                heads: HEADS,
                block,
                window: WINDOW,
            };
            let sees = |at: &_| names.names(at);
            let options = Options::new().mask(Mask::causal().mask_fn(&sees));
            let q = rows_of(b, HEADS, &q, rows, head_dim, queries);
            let k = rows_of(b, KV_HEADS, &stored_k, CAPACITY, head_dim, keys);
            let v = rows_of(b, KV_HEADS, &stored_v, CAPACITY, value_dim, keys);
            let exact = reference::attention::<f64>(&widen(&q), &widen(&k), &widen(&v), shape, &options);
            let naive = reference::attention::<f32>(&q, &k, &v, shape, &options).expect("it fits");
            let magnitude = largest(v.iter().map(|x| f64::from(*x)));
            let judged =
                Judged::new(&widened(&naive.out, DType::F32), exact.expect("it fits").out, magnitude);
            let got = rows_of(b, HEADS, &got, rows, value_dim, queries);
            let got: Vec<f64> = got.into_iter().map(f64::from).collect();
            worst =
                worst.max(judged.judge(&got).map_err(|e| format!("sequence {b}, {queries} queries: {e}"))?);
        }
    }
    Ok(worst)
}

#[test]
fn caches_match_their_rows() {
    let mut report = Report::new("selected attention, caches");
    let storages = [
        CacheStorage::F32,
        CacheStorage::F16,
        CacheStorage::BF16,
        CacheStorage::Q8(ScaleGroup::Of(32)),
        CacheStorage::Q4(ScaleGroup::Row),
        CacheStorage::Q4_0,
        CacheStorage::Q8_0,
    ];
    let layouts = [CacheLayout::Contiguous, CacheLayout::Paged { page: 16, pages: 24 }];
    let lists = [[1, 12, 1], [KV_HEADS, 5, 4], [HEADS, 9, 1]];
    for (n, storage) in storages.into_iter().enumerate() {
        for (m, layout) in layouts.into_iter().enumerate() {
            for (l, list) in lists.into_iter().enumerate() {
                let name = format!("{storage:?}, {layout:?}, lists {list:?}");
                let form = FORMS[(n + m + l) % 2];
                let always = l == (n + m) % 3 && m == n % 2;
                if always || rest(&name) {
                    report.record(&name, &format!("{form:?}"), outcome(storage, layout, form, list));
                }
            }
        }
    }
    report.finish();
}
