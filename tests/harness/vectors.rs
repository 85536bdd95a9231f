//! Test vectors: `tests/vectors`, in the format of its `README.md`.

use std::collections::HashMap;
use std::path::PathBuf;

use half::f16;
use safetensors::{Dtype, SafeTensors};
use wgpu_attention::reference::compare::Tolerance;

use super::case::{HostData, largest};

/// One file.
#[derive(Debug)]
pub struct Vector {
    pub name: String,
    pub attrs: serde_json::Value,
    bytes: Vec<u8>,
    f32_err: HashMap<String, f64>,
    /// The relative and absolute tolerance of ONNX cases.
    onnx: Option<(f64, f64)>,
}

/// Returns the folder of all vectors.
pub fn folder() -> PathBuf {
    super::root().join("tests/vectors")
}

impl Vector {
    pub fn load(family: &str, name: &str) -> Self {
        let path = folder().join(family).join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (_, head) = SafeTensors::read_metadata(&bytes).expect("a safetensors header");
        let meta = head.metadata().clone().expect("metadata");
        assert_eq!(meta["schema"], "attn-vectors/1");
        assert_eq!(meta["case"], name);
        let attrs = serde_json::from_str(&meta["attrs"]).expect("attrs");
        let f32_err = serde_json::from_str(&meta["f32_err"]).expect("f32_err");
        let onnx = meta.get("tol").map(|tol| {
            let tol: HashMap<String, f64> = serde_json::from_str(tol).expect("tol");
            (tol["rtol"], tol["atol"])
        });
        Vector { name: name.to_string(), attrs, bytes, f32_err, onnx }
    }

    fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("safetensors")
    }

    pub fn has(&self, tensor: &str) -> bool {
        self.tensors().tensor(tensor).is_ok()
    }

    pub fn shape(&self, tensor: &str) -> Vec<usize> {
        self.tensors().tensor(tensor).expect(tensor).shape().to_vec()
    }

    /// Returns the shape, padded with ones in front to four axes.
    pub fn shape4(&self, tensor: &str) -> [usize; 4] {
        let shape = self.shape(tensor);
        let mut four = [1; 4];
        four[4 - shape.len()..].copy_from_slice(&shape);
        four
    }

    pub fn is_f16(&self, tensor: &str) -> bool {
        self.tensors().tensor(tensor).expect(tensor).dtype() == Dtype::F16
    }

    pub fn f64(&self, tensor: &str) -> Vec<f64> {
        let tensors = self.tensors();
        let view = tensors.tensor(tensor).expect(tensor);
        let data = view.data();
        match view.dtype() {
            Dtype::F64 => data.chunks_exact(8).map(|c| f64::from_le_bytes(c.try_into().unwrap())).collect(),
            Dtype::F32 => {
                data.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap()).into()).collect()
            }
            Dtype::F16 => {
                data.chunks_exact(2).map(|c| f16::from_le_bytes(c.try_into().unwrap()).to_f64()).collect()
            }
            Dtype::I64 => {
                data.chunks_exact(8).map(|c| i64::from_le_bytes(c.try_into().unwrap()) as f64).collect()
            }
            Dtype::I8 => data.iter().map(|b| f64::from(*b as i8)).collect(),
            other => panic!("{tensor} is {other:?}"),
        }
    }

    /// Returns exactly the stored values: inputs are f32 or f16.
    pub fn f32(&self, tensor: &str) -> Vec<f32> {
        self.f64(tensor).into_iter().map(|x| x as f32).collect()
    }

    pub fn floats(&self, tensor: &str) -> HostData<f32> {
        HostData::new(self.f32(tensor), self.shape4(tensor))
    }

    pub fn bools(&self, tensor: &str) -> HostData<bool> {
        let tensors = self.tensors();
        let view = tensors.tensor(tensor).expect(tensor);
        assert_eq!(view.dtype(), Dtype::BOOL, "{tensor}");
        HostData::new(view.data().iter().map(|b| *b != 0).collect(), self.shape4(tensor))
    }

    /// Returns Booleans of any number of axes.
    pub fn flat_bools(&self, tensor: &str) -> Vec<bool> {
        let tensors = self.tensors();
        let view = tensors.tensor(tensor).expect(tensor);
        assert_eq!(view.dtype(), Dtype::BOOL, "{tensor}");
        view.data().iter().map(|b| *b != 0).collect()
    }

    pub fn integers(&self, tensor: &str) -> Vec<usize> {
        self.f64(tensor).into_iter().map(|x| x as usize).collect()
    }

    pub fn number(&self, attr: &str) -> Option<f64> {
        self.attrs[attr].as_f64()
    }

    pub fn size(&self, attr: &str) -> usize {
        self.attrs[attr].as_u64().unwrap_or_else(|| panic!("{}: no {attr}", self.name)) as usize
    }

    /// Returns an output and the schema's tolerance for results of f32 arithmetic.
    pub fn expected(&self, tensor: &str) -> Option<(Vec<f64>, Tolerance)> {
        if !self.has(tensor) {
            return None;
        }
        let want = self.f64(tensor);
        let magnitude = largest(want.iter().copied());
        let absolute = match self.onnx {
            Some((relative, absolute)) => (relative * magnitude + absolute).max(1e-5),
            None => {
                let known = self.f32_err.get(tensor).copied().unwrap_or(0.0);
                let f16 = if self.has("q") && self.is_f16("q") { 1e-3 } else { 0.0 };
                (8.0 * known).max(2e-6 * magnitude) + f16 * magnitude
            }
        };
        Some((want, Tolerance { absolute }))
    }
}
