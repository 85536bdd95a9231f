//! Analyses the heads: their attention targets, their importance for the loss, and the number of
//! heads that the task needs.

use wgpu_attention::Error;

use crate::model::Model;
use crate::parameters::{HEAD_DIM, HEADS, LAYERS, Places, WIDTH};
use crate::task::{BATCH, Batch, LENGTH, is_known};
use crate::train;

/// A head: its layer, and its number in the layer.
pub type Head = [usize; 2];

/// The importance of each head, by layer and head.
pub type Importance = [[f64; HEADS]; LAYERS];

/// The number of sequences whose mean is the importance.
const SEQUENCES: usize = 16;

pub fn all() -> impl Iterator<Item = Head> {
    (0..LAYERS).flat_map(|layer| (0..HEADS).map(move |head| [layer, head]))
}

/// The mean share of a head's attention that goes to certain positions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Role {
    /// The share for the letter itself.
    pub own: f64,
    /// The share for the previous letter.
    pub previous: f64,
    /// The share for letters that followed earlier occurrences of the same letter, if any.
    pub followed: f64,
}

/// Computes a head's role from a layer's maps of a batch, `[BATCH, HEADS, LENGTH, LENGTH]`.
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
                // With a short period, the letters repeat more than once.
                let earlier = (1..=i / period).map(|n| to(i + 1 - n * period));
                role.followed += earlier.sum::<f64>() / batch.known() as f64;
            }
        }
    }
    role
}

/// Computes the importance of each head: the mean over sequences of |∂ loss / ∂ ξ|, where ξ = 1
/// multiplies the head's result. Source: Michel et al. 2019, "Are sixteen heads really better than
/// one?"
///
/// The computation needs no mask. Columns W of the output projection multiply a head's result c,
/// and W (ξ c) = (ξ W) c. So the gradient of ξ is the sum of W · d_W over these columns, and
/// training computes d_W anyway.
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

/// The indices of the output projection's parameters that multiply a head's result.
pub fn columns(places: &Places, [layer, head]: Head) -> impl Iterator<Item = usize> {
    let first = places.layers[layer].out.first + head * HEAD_DIM;
    (0..WIDTH).flat_map(move |row| (0..HEAD_DIM).map(move |column| first + row * WIDTH + column))
}

/// A pruned head, and the accuracy without it and all heads pruned before.
pub type Pruned = (Head, f64);

/// Prunes all heads one by one, and restores the parameters at the end.
///
/// `choose` picks the next head by the importance of the remaining heads. To prune a head, the
/// function sets the columns that multiply its result to zero.
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
