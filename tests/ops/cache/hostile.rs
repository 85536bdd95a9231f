//! With any order of calls and any contents of the sequence table, a sequence's results come from
//! its own rows.

use wgpu_attention::cache::{Append, CacheLayout, CacheStorage, ScaleGroup, Tokens};
use wgpu_attention::tuning::Target;
use wgpu_attention::{
    Attention, Cache, CacheConfig, Config, DType, Forward, Gpu, KernelOptions, Scratch, ScratchSize,
    TensorView,
};

use crate::harness::{FORMS, full};

const BATCH: usize = 2;
const LEN: usize = 16;
const DIM: usize = 4;

/// A full cache, with values of 1 in sequence 0 and of 1000 in sequence 1. The query weighs all
/// keys equally.
struct Full {
    gpu: &'static Gpu,
    cache: Cache,
    q: wgpu::Buffer,
    out: wgpu::Buffer,
    scratch: Scratch,
}

impl Full {
    fn new(layout: CacheLayout) -> Self {
        Self::with_spare(layout, 0)
    }

    fn with_spare(layout: CacheLayout, spare: usize) -> Self {
        let gpu = &full().gpu;
        let config = CacheConfig::new(1, DIM, LEN).batch(BATCH).layout(layout).spare_tokens(spare);
        let mut cache = Cache::with_pipelines(gpu.pipelines(), config).expect("a cache");
        let scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
        let each = LEN * DIM;
        let values: Vec<f32> = (0..BATCH * each).map(|n| if n < each { 1.0 } else { 1000.0 }).collect();
        let [k, v] = [vec![0.0; BATCH * each], values].map(|x| gpu.upload(&x).expect("upload"));
        let view = |buffer| TensorView::new(buffer, DType::F32, [BATCH, 1, LEN, DIM]);
        gpu.submit(|encoder| {
            cache.advance(encoder, Tokens::All(LEN))?;
            cache.append(encoder, 0, &Append::new(view(&k), view(&v)))
        })
        .expect("room");
        let [q, out] = [(); 2].map(|()| gpu.upload(&[0.0f32; BATCH * DIM]).expect("upload"));
        Full { gpu, cache, q, out, scratch }
    }

    /// Returns the result of sequence 0.
    fn ask(&mut self, form: Target) -> f32 {
        let config = Config::new(1, DIM).kernel_options(KernelOptions::new().splits(1).target(form));
        let attention = Attention::with_pipelines(self.gpu.pipelines(), config).expect("a config");
        let view = |buffer| TensorView::new(buffer, DType::F32, [BATCH, 1, 1, DIM]);
        self.gpu
            .submit(|encoder| {
                self.cache.flush(encoder)?;
                let call = Forward::with_cache(view(&self.q), &self.cache, view(&self.out)).at_end();
                attention.forward(encoder, &call, &mut self.scratch)
            })
            .expect("a call");
        self.gpu.download::<f32>(&self.out, 1).expect("out")[0]
    }
}

#[test]
fn dropped_advance_stays_in_bounds() {
    for form in FORMS {
        let mut ring = Full::with_spare(CacheLayout::Ring { sink_tokens: 0 }, 1);
        let mut dropped = ring.gpu.device().create_command_encoder(&Default::default());
        ring.cache.advance(&mut dropped, Tokens::All(41)).expect("a ring has room");
        drop(dropped);
        ring.cache.truncate(0, 56).expect("as long as the host thinks");
        assert_eq!(ring.ask(form), 1.0, "{form:?}");
    }
}

#[test]
fn wrong_known_length_stays_in_bounds() {
    for form in FORMS {
        let mut ring = Full::new(CacheLayout::Ring { sink_tokens: 0 });
        let none = ring.gpu.upload(&[0u32; BATCH]).expect("upload");
        let counts = TensorView::new(&none, DType::U32, [BATCH, 1, 1, 1]);
        let rows = Tokens::Device { counts, most: 41 };
        ring.gpu.submit(|e| ring.cache.advance(e, rows)).expect("an advance");
        ring.cache.set_known_len(0, 56).expect("within the bounds");
        ring.cache.truncate(0, 56).expect("as long as that");
        assert_eq!(ring.ask(form), 1.0, "{form:?}");
    }
}

#[test]
fn overwritten_block_table_stays_in_bounds() {
    let layouts = [
        CacheLayout::Contiguous,
        CacheLayout::Ring { sink_tokens: 3 },
        CacheLayout::Paged { page: 16, pages: 2 },
    ];
    for (form, layout) in FORMS.into_iter().flat_map(|t| layouts.map(|l| (t, l))) {
        let mut other = Full::new(layout);
        let lengths = other.cache.lengths();
        other.gpu.queue().write_buffer(
            lengths.buffer(),
            4 * lengths.offset() as u64,
            bytemuck::bytes_of(&u32::MAX),
        );
        let got = other.ask(form);
        // A ring of 2²⁹ tokens still retains the same number of tokens.
        assert_eq!(got, 1.0, "{form:?}, {layout:?}");
    }
}

#[test]
fn rows_exceed_workgroup_limit() {
    let gpu = &full().gpu;
    let rows = 70_000;
    let mut cache = Cache::with_pipelines(gpu.pipelines(), CacheConfig::new(1, DIM, rows)).expect("a cache");
    let mut scratch = Scratch::new(gpu.device(), ScratchSize::default()).expect("scratch");
    let mut values = vec![0.0f32; rows * DIM];
    values[(rows - 1) * DIM..].fill(rows as f32);
    let [k, v] = [vec![0.0; rows * DIM], values].map(|x| gpu.upload(&x).expect("upload"));
    let [q, out] = [(); 2].map(|()| gpu.upload(&[0.0f32; DIM]).expect("upload"));
    let view = |buffer, rows| TensorView::new(buffer, DType::F32, [1, 1, rows, DIM]);
    let attention = Attention::with_pipelines(
        gpu.pipelines(),
        Config::new(1, DIM).kernel_options(KernelOptions::new().splits(1)),
    )
    .expect("a config");
    gpu.submit(|encoder| {
        cache.advance(encoder, Tokens::All(rows))?;
        cache.append(encoder, 0, &Append::new(view(&k, rows), view(&v, rows)))?;
        let call = Forward::with_cache(view(&q, 1), &cache, view(&out, 1)).at_end();
        attention.forward(encoder, &call, &mut scratch)
    })
    .expect("a step");
    // The last of them has the whole sum.
    let got = gpu.download::<f32>(&out, 1).expect("out")[0];
    assert!((got - 1.0).abs() < 1e-3, "{got}");
}

#[test]
fn absurd_sizes_do_not_panic() {
    for storage in [
        CacheStorage::Q8(ScaleGroup::Of(0)),
        CacheStorage::Q4(ScaleGroup::Of(0)),
        CacheStorage::Q4(ScaleGroup::Of(usize::MAX)),
        CacheStorage::Q8(ScaleGroup::Row),
    ] {
        assert!(storage.row_bytes(64) > 0);
        assert_eq!(storage.row_bytes(0), 0);
        assert!(storage.row_bytes(usize::MAX) > usize::MAX / 4);
        let config = CacheConfig::new(usize::MAX, usize::MAX, 1 << 20).storage(storage).batch(usize::MAX);
        assert_eq!(config.token_bytes(), usize::MAX);
        assert!(Cache::with_pipelines(full().gpu.pipelines(), config).is_err());
    }
    let many = CacheConfig::new(1, DIM, 1).batch(1 << 20);
    Cache::with_pipelines(full().gpu.pipelines(), many).expect("a cache of many sequences");
}
