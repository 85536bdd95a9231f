//! safetensors: one file, several files with an index, and invalid files.

use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize};
use tempfile::TempDir;
use wgpu_attention_models::{Error, Safetensors, Storage};

/// A file's bytes: names, types, shapes, bytes.
fn file(tensors: &[(&str, Dtype, &[usize], &[u8])]) -> Vec<u8> {
    let view =
        |shape: &[usize], dtype, bytes| TensorView::new(dtype, shape.to_vec(), bytes).expect("a tensor");
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| (*name, view(shape, *dtype, bytes)));
    serialize(views, None).expect("a file")
}

fn sample() -> Vec<u8> {
    let floats: Vec<u8> =
        [1.5f32, -2.0, 0.25, 1e-30, f32::MAX, 7.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    file(&[
        ("floats", Dtype::F32, &[2, 3], &floats),
        // 1, -2, the smallest subnormal; 1, -2, 2^-126.
        ("halves", Dtype::F16, &[3], &[0x00, 0x3c, 0x00, 0xc0, 0x01, 0x00]),
        ("brains", Dtype::BF16, &[3], &[0x80, 0x3f, 0x00, 0xc0, 0x80, 0x00]),
        ("numbers", Dtype::I64, &[1], &[1, 0, 0, 0, 0, 0, 0, 0]),
        ("number", Dtype::F32, &[], &[0, 0, 0x80, 0x3f]),
        ("nothing", Dtype::F32, &[0, 4], &[]),
    ])
}

#[test]
fn tensors_of_every_type() {
    let folder = TempDir::new().expect("a folder");
    fs::write(folder.path().join("model.safetensors"), sample()).expect("written");
    for path in [folder.path().to_path_buf(), folder.path().join("model.safetensors")] {
        let open = Safetensors::open(path).expect("a file");
        let values = |name: &str| open.tensor(name).expect(name).to_f32();
        assert_eq!(values("floats"), [1.5, -2.0, 0.25, 1e-30, f32::MAX, 7.0]);
        assert_eq!(values("halves"), [1.0, -2.0, 2f32.powi(-24)]);
        assert_eq!(values("brains"), [1.0, -2.0, f32::MIN_POSITIVE]);
        assert_eq!(values("number"), [1.0]);
        assert_eq!(values("nothing"), [0.0; 0]);
        let row = open.tensor("floats").and_then(|t| t.at(1)).expect("a row");
        assert_eq!((row.shape(), row.to_f32()), (&[3][..], vec![1e-30, f32::MAX, 7.0]));
        assert_eq!(open.tensor("halves").expect("there").storage(), Storage::F16);
        assert_eq!(open.tensors().len(), 6);
        assert!(open.tensors().iter().any(|t| t.name == "numbers" && t.storage == Storage::Other("I64")));
        let error = open.tensor("numbers").unwrap_err().to_string();
        assert!(error.starts_with("`numbers` is stored as I64, but reading it takes F32, "), "{error}");
        let error = open.tensor("float").unwrap_err().to_string();
        assert!(error.ends_with("; the closest name is `floats`"), "{error}");
    }
}

/// A folder of two files with this index.
fn sharded(index: &str) -> TempDir {
    let folder = TempDir::new().expect("a folder");
    let ones = 1f32.to_le_bytes();
    let twos = 2f32.to_le_bytes();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).expect("written");
    write("a.safetensors", &file(&[("x", Dtype::F32, &[1], &ones), ("stale", Dtype::F32, &[1], &ones)]));
    // This file has an `x`, too; the index names the right one.
    write("b.safetensors", &file(&[("x", Dtype::F32, &[1], &twos), ("y", Dtype::F32, &[1], &twos)]));
    write("broken.safetensors", b"broken");
    write("model.safetensors.index.json", index.as_bytes());
    folder
}

#[test]
fn several_files_with_an_index() {
    let folder = sharded(
        r#"{"metadata": {"total_size": 8}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}"#,
    );
    for path in [folder.path().to_path_buf(), folder.path().join("model.safetensors.index.json")] {
        let open = Safetensors::open(path).expect("an index");
        assert_eq!(open.tensor("x").expect("there").to_f32(), [1.0]);
        assert_eq!(open.tensor("y").expect("there").to_f32(), [2.0]);
        assert!(!open.contains("stale"));
        assert_eq!(open.tensors().len(), 2);
    }
}

#[test]
fn faults_of_an_index_are_named() {
    let cases = [
        ("{", "index file: EOF"),
        ("[]", "the object `weight_map` is missing"),
        (r#"{"weight_map": ["x"]}"#, "the object `weight_map` is missing"),
        (r#"{"weight_map": {"x": 1}}"#, "the file of `x` is not a string"),
        (
            r#"{"weight_map": {"x": "../a.safetensors"}}"#,
            "`x` is in `../a.safetensors`, which is not a file in the folder of the index",
        ),
        (r#"{"weight_map": {"x": "/etc/passwd"}}"#, "which is not a file in the folder of the index"),
        (r#"{"weight_map": {"x": ".."}}"#, "which is not a file in the folder of the index"),
        (r#"{"weight_map": {"x": ""}}"#, "which is not a file in the folder of the index"),
        (
            r#"{"weight_map": {"y": "a.safetensors"}}"#,
            "`y` is missing in `a.safetensors`, although the index names this file",
        ),
        (r#"{"weight_map": {"x": "c.safetensors"}}"#, "c.safetensors: "),
        (
            r#"{"weight_map": {"x": "broken.safetensors"}}"#,
            "broken.safetensors is not a valid safetensors file: ",
        ),
    ];
    for (index, want) in cases {
        let error = Safetensors::open(sharded(index).path()).expect_err(want).to_string();
        assert!(error.contains(want), "{error}\n{want}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn files_that_are_none() {
    let empty = TempDir::new().expect("a folder");
    for (path, want) in [
        (empty.path(), "model.safetensors: "),
        (Path::new("no/such/folder"), "cannot read no/such/folder: "),
        (Path::new("no/such/model.safetensors"), "cannot read no/such/model.safetensors: "),
    ] {
        let error = Safetensors::open(path).expect_err(want).to_string();
        assert!(error.contains(want), "{error}\n{want}");
    }
    fs::write(empty.path().join("model.safetensors"), b"").expect("written");
    assert!(matches!(Safetensors::open(empty.path()), Err(Error::Malformed { .. })));
}

#[test]
fn truncations_and_flipped_bits_do_not_panic() {
    let whole = sample();
    for len in 0..whole.len() {
        let cut = Safetensors::from_bytes("test", whole[..len].to_vec());
        assert!(matches!(cut, Err(Error::Malformed { .. })), "{len}");
    }
    let mut refused = 0;
    for at in 0..whole.len() {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            match Safetensors::from_bytes("test", bytes) {
                Ok(open) => {
                    for info in open.tensors() {
                        if let Ok(tensor) = open.tensor(&info.name) {
                            assert_eq!(tensor.to_f32().len(), tensor.count());
                        }
                    }
                }
                Err(e) => {
                    assert!(matches!(e, Error::Malformed { .. }), "{e}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > whole.len(), "{refused}");
}
