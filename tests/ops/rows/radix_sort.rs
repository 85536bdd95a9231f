//! The sort alone, at every length and width, compared with a stable sort on the host. The ranks
//! invert the sort.

use wgpu_attention::rows::{RadixSort, Sort};
use wgpu_attention::{DType, Scratch, TensorView};

use crate::harness::run::{Layout, Placed};
use crate::harness::{Profile, Report, Rng, Values, full, profiles};

struct Case {
    profile: &'static Profile,
    layout: Layout,
    shape: [usize; 4],
    /// The bits of the keys; below, the bits that are sorted by.
    key_bits: u32,
    bits: u32,
    ranks: bool,
}

impl Case {
    /// Compares with the host, twice.
    fn outcome(&self, seed: u64) -> Result<f64, String> {
        let Case { profile, layout, shape, key_bits, bits, ranks } = *self;
        let rng = &mut Rng::new(seed);
        let n = shape.iter().product::<usize>();
        let keys: Vec<u32> = (0..n).map(|_| (rng.word() >> (64 - key_bits)) as u32).collect();
        let mask = ((1u64 << bits) - 1) as u32;
        let mut order = Vec::new();
        for row in keys.chunks_exact(shape[3]) {
            let mut of_row: Vec<usize> = (0..shape[3]).collect();
            of_row.sort_by_key(|i| row[*i] & mask);
            order.extend(of_row);
        }
        let mut places = vec![0; n];
        for (place, i) in order.iter().enumerate() {
            places[place / shape[3] * shape[3] + i] = place % shape[3];
        }
        profile.tidy();
        let [keys_at, order_at, ranks_at] = layout.places([shape; 3]);
        let keys = Placed::input(profile, Values::Numbers(&keys), DType::U32, keys_at);
        let operator = RadixSort::with_pipelines(profile.gpu.pipelines());
        for _ in 0..2 {
            let order_out = Placed::output(profile, DType::U32, order_at);
            let ranks_out = ranks.then(|| Placed::output(profile, DType::U32, ranks_at));
            let call = Sort::new(keys.view(), order_out.view())
                .bits(bits)
                .ranks(ranks_out.as_ref().map(Placed::view));
            let size = operator.scratch_size(&call).map_err(|e| e.to_string())?;
            let mut scratch = Scratch::new(profile.gpu.device(), size).map_err(|e| e.to_string())?;
            let submitted = profile.gpu.submit(|e| operator.forward(e, &call, &mut scratch));
            submitted.map_err(|e| e.to_string())?;
            for (name, out, want) in
                [("order", Some(&order_out), &order), ("ranks", ranks_out.as_ref(), &places)]
            {
                let Some(out) = out else { continue };
                let got = pollster::block_on(out.download_async(name, profile))?;
                let off = got.iter().zip(want).position(|(got, want)| *got != *want as f64);
                if got.len() != want.len() || off.is_some() {
                    return Err(format!("{name}: differs at {off:?}"));
                }
            }
        }
        Ok(0.0)
    }
}

#[test]
fn rows_are_sorted_as_on_the_host() {
    let mut report = Report::new("radix sort");
    for profile in profiles() {
        for (n, length) in [1, 2, 15, 63, 64, 65, 1023, 1024, 1025, 5000].into_iter().enumerate() {
            for (key_bits, bits) in [(1, 1), (4, 4), (7, 7), (12, 12), (32, 32), (9, 5)] {
                let layout = [Layout::Dense, Layout::Window(2 * n as u64 + 1)][(n + bits as usize) % 2];
                let shape = if n % 2 == 0 { [1, 2, 1, length] } else { [2, 1, 3, length] };
                let case = Case { profile, layout, shape, key_bits, bits, ranks: n % 3 != 0 };
                let setup = format!("{}, {layout:?}, {bits} bits of {key_bits}", profile.name);
                report.record(&format!("{shape:?}"), &setup, case.outcome(n as u64));
            }
        }
    }
    report.finish();
}

/// Equal keys keep their order, alone and among keys of two values.
#[test]
fn the_sort_is_stable() {
    let gpu = &full().gpu;
    let keys: Vec<u32> = (0..3000).map(|i| (i * 7 % 5 == 0) as u32 * 0xffff_ffff).collect();
    let keys_at = gpu.upload(&keys).expect("an upload");
    let order_at = gpu.buffer(4 * keys.len()).expect("a buffer");
    let view = |buffer| TensorView::new(buffer, DType::U32, [1, 1, 1, 3000]);
    let call = Sort::new(view(&keys_at), view(&order_at));
    let operator = RadixSort::with_pipelines(gpu.pipelines());
    let size = operator.scratch_size(&call).expect("a size");
    let mut scratch = Scratch::new(gpu.device(), size).expect("scratch");
    gpu.submit(|e| operator.forward(e, &call, &mut scratch)).expect("a sort");
    let order: Vec<u32> = gpu.download(&order_at, 3000).expect("the order");
    let first = keys.iter().filter(|key| **key == 0).count();
    assert!(order[..first].is_sorted() && order[first..].is_sorted(), "{order:?}");
    assert!(order[..first].iter().all(|i| keys[*i as usize] == 0));
}

#[test]
fn bad_sorts_are_errors() {
    let gpu = &full().gpu;
    let buffers: Vec<_> = (0..3).map(|_| gpu.buffer(256).expect("a buffer")).collect();
    let typed = |n: usize, dtype, shape| TensorView::new(&buffers[n], dtype, shape);
    let view = |n: usize| typed(n, DType::U32, [1, 1, 2, 8]);
    let operator = RadixSort::with_pipelines(gpu.pipelines());
    let mut scratch = Scratch::new(gpu.device(), Default::default()).expect("scratch");
    let mut refused = |call: &Sort, words: &[&str]| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let error = operator.forward(&mut encoder, call, &mut scratch).expect_err("an error").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{words:?}: {error}");
        let mut pass = encoder.begin_compute_pass(&Default::default());
        assert!(operator.forward(&mut pass, call, &mut scratch).is_err());
    };
    refused(&Sort::new(view(0), view(1)), &["scratch"]);
    refused(&Sort::new(view(0), view(1)).bits(0), &["bits", "1 to 32"]);
    refused(&Sort::new(view(0), view(1)).bits(33), &["bits", "33"]);
    refused(&Sort::new(typed(0, DType::F32, [1, 1, 2, 8]), view(1)), &["`keys`", "U32", "F32"]);
    refused(&Sort::new(view(0), typed(1, DType::U32, [1, 1, 2, 7])), &["`order`", "must be 8", "got 7"]);
    refused(&Sort::new(view(0), view(0)), &["`order`", "`keys`"]);
    refused(&Sort::new(view(0), view(1)).ranks(view(1)), &["`order`", "`ranks`"]);
    refused(&Sort::new(view(0), view(1)).ranks(typed(2, DType::Bool, [1, 1, 2, 8])), &["`ranks`", "U32"]);
    refused(&Sort::new(view(0), view(1).with_strides([0, 0, 0, 1])), &["`order`", "share memory"]);
    refused(&Sort::new(typed(0, DType::U32, [1, 1, 2, 80]), typed(1, DType::U32, [1, 1, 2, 80])), &["byte"]);
}
