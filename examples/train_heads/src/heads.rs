//! What the heads are for: what they attend to, what the loss says of each, and how many the task
//! needs.

use wgpu_attention::Error;

use crate::model::Model;
use crate::parameters::{HEAD_DIM, HEADS, LAYERS, Places, WIDTH};
use crate::task::{BATCH, Batch, LENGTH, is_known};
use crate::train;

/// A head: its layer, and its number there.
pub type Head = [usize; 2];

/// By layer and head.
pub type Importance = [[f64; HEADS]; LAYERS];

/// That importance is the mean of.
const SEQUENCES: usize = 16;

pub fn all() -> impl Iterator<Item = Head> {
    (0..LAYERS).flat_map(|layer| (0..HEADS).map(move |head| [layer, head]))
}

/// Of a head's attention, the mean share that goes to one place.
#[derive(Clone, Copy, Debug, Default)]
pub struct Role {
    /// To the letter itself.
    pub own: f64,
    /// To the letter before.
    pub previous: f64,
    /// To what followed the same letter earlier, where it was there before.
    pub followed: f64,
}

/// From a layer's maps of a batch, `[BATCH, HEADS, LENGTH, LENGTH]`.
pub fn role(maps: &[f32], batch: &Batch, head: usize) -> Role {
    let mut role = Role::default();
    for (sequence, period) in batch.periods.iter().enumerate() {
        let map = &maps[(sequence * HEADS + head) * LENGTH * LENGTH..][..LENGTH * LENGTH];
        for i in 1..LENGTH {
            let to = |j: usize| f64::from(map[i * LENGTH + j]);
            let each = 1.0 / (BATCH * (LENGTH - 1)) as f64;
            role.own += each * to(i);
            role.previous += each * to(i - 1);
            if is_known(i, *period) {
                // The letters repeat more than once in short periods.
                let earlier = (1..=i / period).map(|n| to(i + 1 - n * period));
                role.followed += earlier.sum::<f64>() / batch.known() as f64;
            }
        }
    }
    role
}

/// How much the loss depends on each head (Michel et al. 2019, "Are sixteen heads really better
/// than one?"): the mean over sequences of |∂ loss / ∂ ξ|, where ξ = 1 multiplies the head's
/// result.
///
/// No mask is needed for it. A head's result c goes through columns W of the output projection, and
/// W (ξ c) is (ξ W) c: so the gradient of ξ is the sum over these columns of W times d_W, which
/// training computes anyway.
pub fn importance(model: &mut Model, batch: &Batch) -> Result<Importance, Error> {
    let weights = model.parameters()?;
    let mut importance = [[0.0; HEADS]; LAYERS];
    for sequence in 0..SEQUENCES {
        let gradients = model.gradients(&batch.only(sequence))?;
        for [layer, head] in all() {
            let columns = columns(&model.places, [layer, head]);
            let products = columns.map(|n| f64::from(weights[n]) * f64::from(gradients[n]));
            importance[layer][head] += products.sum::<f64>().abs() / SEQUENCES as f64;
        }
    }
    Ok(importance)
}

/// The parameters of the output projection that read a head's result.
pub fn columns(places: &Places, [layer, head]: Head) -> impl Iterator<Item = usize> {
    let first = places.layers[layer].out.first + head * HEAD_DIM;
    (0..WIDTH).flat_map(move |row| (0..HEAD_DIM).map(move |column| first + row * WIDTH + column))
}

/// A head that was pruned, and the accuracy without it and those before.
pub type Pruned = (Head, f64);

/// Prunes all heads, one by one: each time the one that `choose` says by the importance of those
/// that are left. A head is pruned by zeros in the columns that read it; what it attends to then
/// changes nothing. Leaves the parameters as they were.
pub fn prune(
    model: &mut Model,
    held_out: &[Batch],
    choose: impl Fn(f64, f64) -> bool,
) -> Result<Vec<Pruned>, Error> {
    let trained = model.parameters()?;
    let mut weights = trained.clone();
    let mut left: Vec<Head> = all().collect();
    let mut pruned = Vec::new();
    while !left.is_empty() {
        let importance = importance(model, &held_out[0])?;
        let of = |n: usize| importance[left[n][0]][left[n][1]];
        let chosen = (1..left.len()).fold(0, |a, b| if choose(of(b), of(a)) { b } else { a });
        let head = left.remove(chosen);
        columns(&model.places, head).for_each(|n| weights[n] = 0.0);
        model.set_parameters(&weights);
        pruned.push((head, train::score(model, held_out)?.accuracy));
    }
    model.set_parameters(&trained);
    Ok(pruned)
}
