//! Gradients on a device against the reference: shapes, masks, types, layouts, random problems.

use wgpu_attention::Shape;

use crate::harness::backward::BackwardSetup;
use crate::harness::gradients::Problem;
use crate::harness::{Case, FORMS, Report, Rng, full};
use crate::property::{DIMS, DropDraw, LENGTHS, MaskDraw, profile};

/// Queries, keys, channels of keys and of values, about the sizes of tiles.
const SIZES: [[usize; 4]; 10] = [
    [1, 1, 1, 1],
    [5, 9, 3, 4],
    [8, 24, 16, 16],
    [33, 31, 32, 32],
    [64, 65, 64, 64],
    [31, 100, 63, 65],
    [70, 40, 128, 128],
    [20, 37, 72, 40],
    [12, 50, 40, 130],
    [9, 33, 256, 200],
];

#[test]
fn shapes() {
    let mut report = Report::new("gradients of shapes");
    for [q_len, kv_len, head_dim, value_dim] in SIZES {
        let shape = Shape { batch: 2, heads: 4, kv_heads: 2, q_len, kv_len, head_dim, value_dim };
        let name = format!("{q_len}x{kv_len}x{head_dim}x{value_dim}");
        let problem = Problem::new(Case::random(name, shape), 0, true);
        for form in FORMS {
            report.check_backward(&problem, &BackwardSetup::plain(full(), form));
        }
    }
    report.finish();
}

/// A random problem.
fn draw(name: String) -> (Problem, BackwardSetup) {
    let rng = &mut Rng::named(&name);
    let kv_heads = rng.between(1, 2);
    let (q_len, kv_len) = (rng.pick(LENGTHS), rng.pick(LENGTHS));
    let head_dim = rng.pick(DIMS);
    let shape = Shape {
        batch: rng.between(1, 2),
        heads: kv_heads * rng.between(1, 3),
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim: if rng.chance(0.5) { head_dim } else { rng.pick(DIMS) },
    };
    let profile = profile(rng);
    let setup = BackwardSetup::random(rng, profile, FORMS);
    let mask = MaskDraw::random(rng, kv_len);
    let case = Case::random(name, shape).with(|c| {
        c.rules = mask.rules(rng, &shape, 0);
        c.scale = rng.chance(0.2).then_some(-0.75);
        c.softcap = rng.chance(0.25).then_some(1.5);
        c.dropout = DropDraw::random(rng).dropout(rng, shape.weights());
    });
    (Problem::new(case, 0, rng.chance(0.5)), setup)
}

const DRAWS: usize = 60;

#[test]
fn random_problems() {
    let mut report = Report::new("gradients of random problems");
    for n in 0..DRAWS {
        let (problem, setup) = draw(format!("gradients {n}"));
        report.check_backward(&problem, &setup);
    }
    report.finish();
}
