use wgpu_attention::reference::compare::EPSILON_F32;
use wgpu_attention::reference::widen;

use super::*;
use crate::heads;
use training::{DECAY, EPSILON, KEEP_MEAN, KEEP_SQUARE, Random};

use crate::kernels::BIAS_RATE;
use crate::parameters::{HEAD_DIM, Places};
use crate::task::{NONE, Series};
use crate::train::{self, held_out};

const SEED: u64 = 3;

fn model() -> Model {
    Model::new(&Gpu::new().unwrap(), SEED).unwrap()
}

fn batch() -> Batch {
    Batch::new(&mut Random::new(SEED, Series::Training as usize))
}

fn download(model: &Model, buffer: &wgpu::Buffer) -> Vec<f32> {
    model.gpu.download(buffer, buffer.size() as usize / size_of::<f32>()).unwrap()
}

#[track_caller]
fn close(got: f64, want: f64, tolerance: f64) {
    assert!((got - want).abs() <= tolerance, "{got} is not {want}, by more than {tolerance}");
}

/// Compares the example's kernels with a computation on the CPU in f64.
#[test]
fn kernels() {
    let (mut model, batch) = (model(), batch());
    let before = model.parameters().unwrap();
    model.train(&batch, 0.01, 3).unwrap();
    let tokens = || batch.tokens.iter().map(|token| *token as usize);

    let stream = download(&model, &model.stream[0]);
    for (row, token) in stream.chunks(WIDTH).zip(tokens()) {
        assert_eq!(row, &before[model.places.embed.first + token * WIDTH..][..WIDTH]);
    }
    let next = stream.iter().zip(download(&model, &model.stream[1]));
    let far = next.filter(|(before, after)| *before != after).count();
    assert!(far > ROWS * WIDTH / 2, "the first layer adds nothing");

    // WGSL's exp is accurate to 3 + 2 |x| units; these logits differ by less than 20.
    let unit = 43.0 * f64::from(f32::EPSILON);
    let (logits, d_logits) = (download(&model, &model.logits), download(&model, &model.d_logits));
    let (mut loss, mut hits) = (0.0, 0.0);
    let per_target = 1.0 / batch.known() as f64;
    let rows = logits.chunks(VOCABULARY).zip(d_logits.chunks(VOCABULARY));
    for ((logits, d_logits), target) in rows.zip(&batch.targets) {
        let exp: Vec<f64> = logits.iter().map(|x| f64::from(*x).exp()).collect();
        let sum: f64 = exp.iter().sum();
        for (t, d_logit) in d_logits.iter().enumerate() {
            let wanted = if t as u32 == *target { 1.0 } else { 0.0 };
            let want = if *target == NONE { 0.0 } else { per_target * (exp[t] / sum - wanted) };
            close(f64::from(*d_logit), want, 2.0 * unit * per_target);
        }
        if *target != NONE {
            loss -= (exp[*target as usize] / sum).ln();
            let wanted = exp[*target as usize];
            hits += if exp.iter().all(|x| *x <= wanted) { 1.0 } else { 0.0 };
        }
    }
    let totals = download(&model, &model.totals);
    close(f64::from(totals[6]), loss, 4.0 * unit * loss);
    assert_eq!(f64::from(totals[7]), hits);

    let gradients = download(&model, &model.gradients);
    let d_x = download(&model, &model.d_stream[0]);
    for token in 0..VOCABULARY {
        for column in 0..WIDTH {
            let rows = tokens().zip(d_x.chunks(WIDTH)).filter(|(t, _)| *t == token);
            let terms: Vec<_> = rows.map(|(_, row)| f64::from(row[column])).collect();
            let size: f64 = terms.iter().map(|x| x.abs()).sum();
            let got = gradients[model.places.embed.first + token * WIDTH + column];
            close(f64::from(got), terms.iter().sum(), terms.len() as f64 * EPSILON_F32 * size);
        }
    }
}

/// Compares two steps of AdamW with a computation on the CPU in f64.
#[test]
fn adamw() {
    let mut model = model();
    let mut want: Vec<f64> = widen(&model.parameters().unwrap());
    let (mut means, mut squares) = (vec![0.0; want.len()], vec![0.0; want.len()]);
    let rate = 0.01;
    let (mut random, [keep_mean, keep_square]) =
        (Random::new(SEED, Series::Training as usize), [KEEP_MEAN, KEEP_SQUARE].map(f64::from));
    for step in 1..=2 {
        model.train(&Batch::new(&mut random), rate, 0).unwrap();
        let gradients: Vec<f64> = widen(&download(&model, &model.gradients));
        for (n, g) in gradients.into_iter().enumerate() {
            means[n] = keep_mean * means[n] + (1.0 - keep_mean) * g;
            squares[n] = keep_square * squares[n] + (1.0 - keep_square) * g * g;
            let mean = means[n] / (1.0 - keep_mean.powi(step));
            let square = squares[n] / (1.0 - keep_square.powi(step));
            let rate = if n < model.places.biases() { rate } else { rate * f64::from(BIAS_RATE) };
            want[n] -= rate * (mean / (square.sqrt() + f64::from(EPSILON)) + f64::from(DECAY) * want[n]);
        }
    }
    // Allow a few roundings of the change, which is about the rate, and of the parameter.
    for (got, want) in model.parameters().unwrap().into_iter().zip(want) {
        close(f64::from(got), want, EPSILON_F32 * (32.0 * rate * f64::from(BIAS_RATE) + 4.0 * want.abs()));
    }
}

/// Compares the model's gradients with finite differences of the loss along them, one tensor at a
/// time. Does the same for the gradients of each head's ξ.
#[test]
fn gradients() {
    let (mut model, batch) = (model(), batch());
    // Train a little first: at the start, all biases by distance are 0.
    train::train(&mut model, 30, SEED, None).unwrap();
    let weights = model.parameters().unwrap();
    let gradients = model.gradients(&batch).unwrap();
    let mut slope = |direction: &[f32], by: f64| {
        let loss = [1.0, -1.0].map(|sign| {
            let moved = weights.iter().zip(direction).map(|(w, d)| w + (sign * by * f64::from(*d)) as f32);
            model.set_parameters(&moved.collect::<Vec<_>>());
            model.score(&batch).unwrap().loss
        });
        (loss[0] - loss[1]) / (2.0 * by)
    };
    for place in Places::new().all() {
        let own = |n: &usize| (place.first..place.first + place.len()).contains(n);
        let mut direction = gradients.clone();
        direction.iter_mut().enumerate().filter(|(n, _)| !own(n)).for_each(|(_, x)| *x = 0.0);
        let square: f64 = direction.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!(square > 0.0, "{} has no gradient", place.name);
        // The step changes the loss by 0.01 or the parameters by 0.1. Such a change is above the
        // loss's rounding, about 1e-6, and small enough for the error of finite differences.
        let by = (0.005 / square).min(0.1 / square.sqrt());
        close(slope(&direction, by) / square, 1.0, 0.005);
    }
    for head in heads::all() {
        let mut direction = vec![0.0; weights.len()];
        heads::columns(&Places::new(), head).for_each(|n| direction[n] = weights[n]);
        let want: f64 = direction.iter().zip(&gradients).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        // Allow for two losses, each rounded by about 1e-6, over the distance of 0.04.
        close(slope(&direction, 0.02), want, 0.005 * want.abs() + 5e-5);
    }
}

/// Zero columns of a head in the output projection have the same effect as zero values of the head.
#[test]
fn columns_are_those_of_the_head() {
    let (mut model, batch) = (model(), batch());
    let (weights, places) = (model.parameters().unwrap(), Places::new());
    let mut loss = |zeros: &mut dyn Iterator<Item = usize>| {
        let mut pruned = weights.clone();
        zeros.for_each(|n| pruned[n] = 0.0);
        model.set_parameters(&pruned);
        model.score(&batch).unwrap().loss
    };
    let all = loss(&mut std::iter::empty());
    for [layer, head] in heads::all() {
        let without = loss(&mut heads::columns(&places, [layer, head]));
        let first = places.layers[layer].value.first + head * HEAD_DIM * WIDTH;
        let want = loss(&mut (first..first + HEAD_DIM * WIDTH));
        // The output projection computes the same numbers, except for the sign of zeros.
        close(without, want, 4.0 * EPSILON_F32 * want);
        assert!((without - all).abs() > 1e-3, "head {layer}.{head} does nothing");
    }
}

#[test]
fn the_same_bits_every_time() {
    let trained = || {
        let mut model = model();
        let scores = train::train(&mut model, SLOTS + 3, SEED, None).unwrap();
        let bits: Vec<u32> = model.parameters().unwrap().iter().map(|x| x.to_bits()).collect();
        (bits, scores.iter().map(|score| score.loss.to_bits()).collect::<Vec<_>>())
    };
    let [first, second] = [trained(), trained()];
    assert!(first == second);
    assert!(first.0 != model().parameters().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>());
}

#[test]
fn pruning_takes_every_head_and_leaves_the_weights_as_they_were() {
    let (mut model, held_out) = (model(), held_out(1, SEED));
    let weights = model.parameters().unwrap();
    let pruned = heads::prune(&mut model, &held_out, |a, b| a < b).unwrap();
    let mut heads: Vec<_> = pruned.into_iter().map(|(head, _)| head).collect();
    heads.sort_unstable();
    assert!(heads.into_iter().eq(heads::all()));
    assert!(weights == model.parameters().unwrap());
}
