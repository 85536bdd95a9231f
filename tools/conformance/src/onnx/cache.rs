//! TensorScatter.

use std::collections::BTreeMap;

use wgpu_attention::cache::{Append, CacheRead, CacheStorage, Tokens};
use wgpu_attention::position::RowPositions;
use wgpu_attention::{Cache, CacheConfig, DType, Gpu};

use crate::case::Case;
use crate::outcome::{Failed, Outcome, Ran, float};
use crate::tensor::Placed;

/// A full cache, of which the update overwrites rows.
pub fn scatter(gpu: &Gpu, case: &Case) -> Ran {
    let [past, update] = ["past_cache", "update"].map(|name| case.input(name));
    let (past, update) = (past?, update?);
    let dtype = float(past)?;
    if dtype != DType::F32 {
        return Err(Failed("a cache of another type".into()));
    }
    // The axis of the rows is the last but one. Without an axis of heads there is one head.
    let four = |shape: &[usize]| match *shape {
        [batch, rows, dim] => Ok([batch, 1, rows, dim]),
        [batch, heads, rows, dim] => Ok([batch, heads, rows, dim]),
        _ => Err(Failed("other axes".into())),
    };
    let (shape, new) = (four(&past.shape)?, four(&update.shape)?);
    let [batch, heads, capacity, dim] = shape;
    let starts = case.inputs.get("write_indices").map_or(vec![0.0; batch], |t| t.data.clone());
    let circular = case.text("mode") == Some("circular");
    let place = |row: f64| if circular { row % capacity as f64 } else { row };
    let positions: Vec<f64> =
        starts.iter().flat_map(|start| (0..new[2]).map(move |row| place(start + row as f64))).collect();
    let positions = Placed::new(gpu, &positions, DType::U32, [batch, 1, new[2], 1])?;
    let config = CacheConfig::new(heads, dim, capacity).batch(batch).storage(CacheStorage::F32);
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config)?;
    let (old, rows) =
        (Placed::new(gpu, &past.data, dtype, shape)?, Placed::new(gpu, &update.data, dtype, new)?);
    let [k, v] = [Placed::output(gpu, dtype, shape)?, Placed::output(gpu, dtype, shape)?];
    gpu.submit(|e| {
        cache.advance(e, Tokens::All(capacity))?;
        cache.append(e, 0, &Append::new(old.view(), old.view()))?;
        cache.overwrite(
            e,
            0,
            &Append::new(rows.view(), rows.view()),
            RowPositions::Tensor(positions.view()),
        )?;
        cache.read(e, 0, &CacheRead::new(k.view(), v.view()))
    })?;
    Ok(Outcome::Computed(BTreeMap::from([("present_cache", k.download(gpu)?)])))
}
