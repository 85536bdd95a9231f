//! Attention on every path, target and type, with key splits and every change of scores.

use wgpu_attention::tuning::{Algorithm, Target};
use wgpu_attention::{DType, Shape};

use super::Work;
use crate::harness::{Case, DropoutData, FORMS, HostData, Layout, Profile, Rng, Setup, Weights};

/// More than one tile of queries and keys, with partial tiles, in groups of two heads.
pub const SHAPE: Shape =
    Shape { batch: 2, heads: 4, kv_heads: 2, q_len: 37, kv_len: 70, head_dim: 8, value_dim: 12 };

pub fn setup(profile: &'static Profile, path: Algorithm, form: Target, dtype: DType) -> Setup {
    Setup { dtype, ..Setup::plain(profile, form, path) }
}

/// The score vector of additive scores, one for each head.
pub fn score_vector(case: &Case) -> Vec<f32> {
    Rng::named(&format!("{} vector", case.name)).normals(case.shape.heads * case.shape.head_dim)
}

pub fn cases(profile: &'static Profile) -> Vec<(String, Work)> {
    let mut all = Vec::new();
    let mut add = |what: &str, shape: Shape, setup: Setup, splits, change: &dyn Fn(&mut Case)| {
        let Setup { path, form, dtype, layout, .. } = setup;
        let name = format!("{what}, {path:?}, {form:?}, {dtype:?}, {layout:?}");
        let case = Case::random(name.clone(), shape).with(change);
        all.push((name, Work::Attention(Box::new(case), setup, splits)));
    };
    let same = |_: &mut Case| {};
    let additive = |c: &mut Case| c.score_vector = Some(score_vector(c));
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16];
    let own = Shape::new(2, 3, 37, 20);
    let odd = Shape { head_dim: 13, value_dim: 7, ..SHAPE };
    for (n, form) in FORMS.into_iter().enumerate() {
        let staged = |dtype| setup(profile, Algorithm::Staged, form, dtype);
        let fused = |dtype| setup(profile, Algorithm::Fused, form, dtype);
        let heads = Setup { weights: Weights::PerHead(f32), ..staged(f32) };
        let mean = Setup { weights: Weights::Mean(f16), layout: Layout::Blhd, ..staged(f16) };
        add("self-attention", own, Setup { layout: Layout::Packed, ..heads }, None, &same);
        add("mean weights", SHAPE, mean, None, &same);
        add("self-attention", own, Setup { layout: Layout::Packed, ..fused(f32) }, None, &same);
        add("grouped heads", SHAPE, Setup { layout: Layout::Blhd, ..fused(f16) }, None, &same);
        let window = Layout::Window(2 * n as u64 + 1);
        add("odd channels", odd, Setup { layout: window, ..fused([f32, f16][n]) }, None, &same);

        add("bf16", odd, Setup { layout: window, ..[fused(bf16), staged(bf16)][n] }, None, &same);

        let few = Shape { q_len: 3, kv_len: 150, ..SHAPE };
        add("few queries", few, fused(f32), Some(3), &same);
        let one = Shape { q_len: 1, ..few };
        add("one query, causal", one, Setup { path: Algorithm::Auto, ..fused([f16, f32][n]) }, None, &|c| {
            c.rules.causal = true;
        });

        let causal = |c: &mut Case| {
            additive(c);
            c.rules.causal = true;
        };
        add("additive", SHAPE, fused([f32, bf16][n]), None, &additive);
        add("additive, causal", odd, Setup { layout: window, ..fused([f16, f32][n]) }, None, &causal);
        add("additive, few queries", few, fused(f32), Some(3), &additive);
        add("additive", SHAPE, Setup { weights: Weights::PerHead(f32), ..staged(f32) }, None, &additive);

        // These cases run on one target only.
        if n == 0 {
            add("softcap and scale", SHAPE, fused(f32), None, &|c| {
                (c.scale, c.softcap) = (Some(1.5), Some(2.0))
            });
            add("dropout by a seed", SHAPE, staged(f32), None, &|c| {
                c.dropout = Some(DropoutData::Seeded { p: 0.25, seed: 7 });
            });
            add("large scores", SHAPE, fused(f32), None, &|c| c.q.iter_mut().for_each(|q| *q *= 300.0));
        } else {
            add("additive, one key", Shape { kv_len: 1, ..SHAPE }, fused(f32), None, &additive);
            add("dropout by a tensor", SHAPE, fused(f32), None, &|c| {
                let keep = HostData::of(SHAPE.weights(), |[b, h, i, j]| (3 * b + h + i + 5 * j) % 4 != 0);
                c.dropout = Some(DropoutData::Given { p: 0.25, keep });
            });
            add("one key", Shape { kv_len: 1, ..SHAPE }, fused(f32), None, &same);
            add("one of everything", Shape::new(1, 1, 1, 1), staged(f32), None, &same);
        }
    }
    all
}
