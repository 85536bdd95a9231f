//! Rows of a cache that are read back or overwritten.

use wgpu_attention::cache::{Append, CacheRead};
use wgpu_attention::position::RowPositions;
use wgpu_attention::{DType, Error};

use super::bed::Bed;
use super::model::{Kind, Token};
use crate::harness::case::HostData;
use crate::harness::memory::Values;
use crate::harness::positions::{place_positions, placed_positions, position_of, rounding};
use crate::harness::run::{Layout, Placed};

/// Positions of rows in a cache.
pub type Places = RowPositions<HostData<u32>>;

impl Bed {
    /// Returns the position of row `i` of sequence `s`, if a layer and head of the cache has it.
    /// The call has `rows` rows at `at`.
    fn found(
        &self,
        at: &Places,
        [layer, head]: [usize; 2],
        [s, i]: [usize; 2],
        rows: usize,
    ) -> Option<usize> {
        let position = position_of(at, s, i, rows);
        let position = usize::try_from(position).ok().filter(|p| *p < self.sequences[s].len())?;
        self.sequences[s].holds(&self.kind, [layer, head, position]).then_some(position)
    }

    /// Reads rows of a layer and compares them with the model. Each value is within the storage's
    /// rounding, and missing rows are zero.
    pub fn read(
        &self,
        layer: usize,
        at: &Places,
        rows: usize,
        dtype: DType,
        layout: Layout,
    ) -> Result<f64, String> {
        let Kind { batch, kv_heads, head_dim, value_dim, .. } = self.kind;
        let shapes = [head_dim, value_dim].map(|dim| [batch, kv_heads, rows, dim]);
        let outputs = layout.places(shapes).map(|place| Placed::output(self.profile, dtype, place));
        let tensor = place_positions(self.profile, at);
        let call = CacheRead::new(outputs[0].view(), outputs[1].view());
        let call = call.at(placed_positions(at, tensor.as_ref()));
        let mut encoder = self.encoder();
        self.cache.read(&mut encoder, layer, &call).map_err(|e| format!("refused: {e}"))?;
        self.submit(encoder);
        let mut worst = 0f64;
        for (side, name) in ["k", "v"].into_iter().enumerate() {
            let got = pollster::block_on(outputs[side].download_async(name, self.profile))?;
            let dim = shapes[side][3];
            for (n, got) in got.chunks(dim).enumerate() {
                let (s, h, i) = (n / rows / kv_heads, n / rows % kv_heads, n % rows);
                let Some(position) = self.found(at, [layer, h], [s, i], rows) else {
                    if got.iter().any(|x| *x != 0.0) {
                        return Err(format!(
                            "{name}, sequence {s}, head {h}: row {i} is not there and not zeros"
                        ));
                    }
                    continue;
                };
                let token = &self.sequences[s].tokens[position][layer];
                let want = &[&token.k, &token.v][side][h * dim..][..dim];
                let off = self.data.off(&self.kind, self.kind.storages()[side], want);
                for (d, ((got, want), off)) in got.iter().zip(want).zip(off).enumerate() {
                    let want = f64::from(*want);
                    let [relative, least] = rounding(dtype);
                    let allowed = off + (want.abs() + off) * relative + least;
                    let apart = (got - want).abs();
                    // NaN fails every comparison.
                    if apart > allowed || apart.is_nan() {
                        return Err(format!(
                            "{name}, sequence {s}, head {h}, position {position}, channel {d} is {got}, not {want}"
                        ));
                    }
                    worst = worst.max(apart / allowed.max(f64::MIN_POSITIVE));
                }
            }
        }
        Ok(worst)
    }

    /// Writes new rows over rows of a layer, in the cache and in the model.
    pub fn overwrite(&mut self, layer: usize, at: &Places, rows: usize) -> Result<(), Error> {
        let Kind { batch, kv_heads, head_dim, value_dim, .. } = self.kind;
        let new: Vec<Vec<Token>> =
            (0..batch).map(|_| (0..rows).map(|_| self.draw_token()).collect()).collect();
        let shapes = [head_dim, value_dim].map(|dim| [batch, kv_heads, rows, dim]);
        let places = self.layout.places(shapes);
        let placed = [0, 1].map(|side| {
            let dim = shapes[side][3];
            let part = HostData::of(shapes[side], |[s, h, i, d]| {
                let Token { k, v } = &new[s][i];
                // NaN in dropped rows must not reach a result.
                if self.found(at, [layer, h], [s, i], rows).is_some() {
                    [k, v][side][h * dim + d]
                } else {
                    f32::NAN
                }
            });
            Placed::input(self.profile, Values::Floats(&part.data), self.dtype, places[side])
        });
        let tensor = place_positions(self.profile, at);
        let mut encoder = self.encoder();
        let append = Append::new(placed[0].view(), placed[1].view());
        let positions = placed_positions(at, tensor.as_ref());
        self.cache.overwrite(&mut encoder, layer, &append, positions)?;
        self.submit(encoder);
        for (s, new) in new.into_iter().enumerate() {
            let mut dropped = false;
            for (i, token) in new.into_iter().enumerate() {
                for h in 0..kv_heads {
                    let Some(position) = self.found(at, [layer, h], [s, i], rows) else {
                        dropped = true;
                        continue;
                    };
                    let old = &mut self.sequences[s].tokens[position][layer];
                    let head = |x: &[f32], dim: usize| x[h * dim..][..dim].to_vec();
                    old.k[h * head_dim..][..head_dim].copy_from_slice(&head(&token.k, head_dim));
                    old.v[h * value_dim..][..value_dim].copy_from_slice(&head(&token.v, value_dim));
                }
            }
            self.sequences[s].refused += u32::from(dropped);
        }
        Ok(())
    }
}
