//! GGUF: a file written by llama.cpp's package, and bytes that are not valid GGUF.

use wgpu_attention_models::{Array, Error, Gguf, Storage, Value};

const TYPES: [(&str, Storage); 6] = [
    ("F32", Storage::F32),
    ("F16", Storage::F16),
    ("BF16", Storage::BF16),
    ("Q8_0", Storage::Q8_0),
    ("Q4_0", Storage::Q4_0),
    ("Q4_1", Storage::Q4_1),
];
/// See `data/make.py`.
const FILE: &[u8] = include_bytes!("data/every_type.gguf");
/// The first byte of the tensors' data, in which every byte value is valid.
const HEAD: usize = 1344;

fn parse(bytes: Vec<u8>) -> Result<Gguf, Error> {
    Gguf::from_bytes("test", bytes)
}

/// Reads all metadata and tensors of a file.
fn visit(file: &Gguf) {
    for (key, value) in file.all_metadata() {
        // Compare as text: NaN is not equal to itself.
        assert_eq!(format!("{:?}", file.metadata(key)), format!("{:?}", Some(value)));
    }
    for info in file.tensors() {
        match file.tensor(&info.name) {
            Ok(tensor) => {
                assert_eq!(tensor.to_f32().len(), tensor.count());
                if let Ok(part) = tensor.at(0) {
                    assert_eq!(part.to_f32().len(), part.count());
                }
            }
            Err(e) => assert!(matches!(e, Error::Type { .. }), "{e}"),
        }
    }
}

#[test]
fn tensors_are_what_their_writer_dequantises_them_to() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/every_type.gguf");
    let file = Gguf::open(path).expect("a GGUF file");
    assert_eq!(file.tensors().len(), 2 * TYPES.len() + 2);
    for (name, storage) in TYPES {
        let tensor = file.tensor(name).expect(name);
        assert_eq!((tensor.name(), tensor.shape(), tensor.storage()), (name, &[2, 3, 64][..], storage));
        let want = file.tensor(&format!("{name}.dequantised")).expect(name);
        assert_eq!((want.storage(), want.count()), (Storage::F32, 384));
        let (got, want) = (tensor.to_f32(), want.to_f32());
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&want), "{name}");
        assert!(got[4] < -59000.0, "{name} has its outlier: {}", got[4]);

        // Slices have the same values as the whole tensor.
        let part = tensor.at(1).and_then(|part| part.at(2)).expect(name);
        assert_eq!((part.shape(), bits(&part.to_f32())), (&[64][..], bits(&want[5 * 64..])), "{name}");
        assert!(tensor.at(2).is_err(), "{name}");
        assert_eq!(part.at(0).is_ok(), storage.block().is_some_and(|(elements, _)| elements == 1), "{name}");
    }
    assert_eq!(file.tensor("vector").expect("there").to_f32(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
}

#[test]
fn metadata_of_every_type() {
    let file = parse(FILE.to_vec()).expect("a GGUF file");
    let want = [
        ("of.u8", Value::U8(200)),
        ("of.i8", Value::I8(-5)),
        ("of.u16", Value::U16(60000)),
        ("of.i16", Value::I16(-300)),
        ("of.u32", Value::U32(4_000_000_000)),
        ("of.i32", Value::I32(-70000)),
        ("of.u64", Value::U64(1 << 40)),
        ("of.i64", Value::I64(-(1 << 40))),
        ("of.f32", Value::F32(0.5)),
        ("of.f64", Value::F64(1e-300)),
        ("of.bool", Value::Bool(true)),
        ("of.string", Value::String("Grüße, 世界".into())),
        ("of.strings", Value::Array(Array::String(vec!["<s>".into(), String::new(), "Ġa".into()]))),
        ("of.numbers", Value::Array(Array::I32(vec![1, -2, 3]))),
        ("of.floats", Value::Array(Array::F32(vec![0.25, -1.5]))),
        ("general.alignment", Value::U32(64)),
        ("general.architecture", Value::String("llama".into())),
    ];
    for (key, value) in &want {
        assert_eq!(file.metadata(key), Some(value), "{key}");
    }
    assert_eq!(file.all_metadata().count(), want.len());
    assert_eq!(file.u64("of.u8").expect("a number"), 200);
    assert_eq!(file.u64("of.u64").expect("a number"), 1 << 40);
    assert_eq!(file.f64("of.f32").expect("a float"), 0.5);
    assert_eq!(file.str("of.string").expect("a string"), "Grüße, 世界");
    assert!(file.bool("of.bool").expect("a boolean"));
    assert_eq!(file.strings("of.strings").expect("strings").len(), 3);
    assert_eq!(file.array("of.floats").expect("an array").len(), 2);
    let messages = [
        (
            file.u64("of.i8").unwrap_err(),
            "the metadata of test has no whole number `of.i8`; `of.i8` is a signed number",
        ),
        (
            file.str("of.u8").unwrap_err(),
            "the metadata of test has no string `of.u8`; `of.u8` is an unsigned number",
        ),
        (file.f64("nothing").unwrap_err(), "the metadata of test has no float `nothing`"),
        (
            file.strings("of.floats").unwrap_err(),
            "the metadata of test has no array of strings `of.floats`; `of.floats` is an array",
        ),
    ];
    for (error, want) in messages {
        assert_eq!(error.to_string(), want);
    }
}

#[test]
fn missing_or_unread_entries_are_named() {
    let file = parse(FILE.to_vec()).expect("a GGUF file");
    let message = |name: &str| file.tensor(name).unwrap_err().to_string();
    assert_eq!(
        message("BF16.dequantized"),
        "no tensor `BF16.dequantized` in test; the closest name is `BF16.dequantised`"
    );
    assert_eq!(message("zzz"), "no tensor `zzz` in test");
    assert_eq!(
        message("Q5_0"),
        "`Q5_0` is stored as Q5_0, but reading it takes F32, F16, BF16, Q8_0, Q4_0 or Q4_1; convert the file"
    );
    let error = file.tensor("vector").expect("there").expect_shape(&[8]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`vector` has shape [7], but the model needs [8]; check that the file belongs to this model"
    );
    let error = Gguf::open("no/such/file.gguf").unwrap_err().to_string();
    assert!(error.starts_with("cannot read no/such/file.gguf: "), "{error}");
    let error = Gguf::open(env!("CARGO_MANIFEST_DIR")).unwrap_err().to_string();
    assert!(error.starts_with("cannot read "), "{error}");
}

#[test]
fn every_truncation_is_an_error() {
    // Tensors are padded to the alignment, so only the padding after the last may be missing.
    let end = FILE.len() - 64 + 7 * 4;
    assert!(parse(FILE[..end].to_vec()).is_ok());
    for len in 0..end {
        let error = parse(FILE[..len].to_vec()).expect_err("cut off");
        assert!(matches!(error, Error::Malformed { .. }), "{len}: {error}");
    }
}

#[test]
fn no_flipped_bit_panics() {
    let mut refused = 0;
    for at in 0..HEAD {
        for bit in 0..8 {
            let mut bytes = FILE.to_vec();
            bytes[at] ^= 1 << bit;
            match parse(bytes) {
                Ok(file) => visit(&file),
                Err(e) => {
                    assert!(matches!(e, Error::Malformed { .. }), "{e}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > HEAD, "{refused}");
}

#[test]
fn no_overwritten_length_panics() {
    for at in 0..HEAD - 8 {
        for value in [u64::MAX, u64::MAX / 2, 1 << 32, 1 << 20, 0] {
            let mut bytes = FILE.to_vec();
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            if let Ok(file) = parse(bytes) {
                visit(&file);
            }
        }
    }
}

/// The start of a file with `tensors` tensors and `entries` metadata entries.
fn start(version: u32, tensors: u64, entries: u64) -> Vec<u8> {
    [&b"GGUF"[..], &version.to_le_bytes(), &tensors.to_le_bytes(), &entries.to_le_bytes()].concat()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn tensor(name: &str, shape: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let shape = shape.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    let dimensions = (shape.len() as u32 / 8).to_le_bytes();
    [&text(name)[..], &dimensions, &shape, &kind.to_le_bytes(), &offset.to_le_bytes()].concat()
}

#[test]
fn faults_are_named() {
    let entry = |key: &str, kind: u32, value: &[u8]| [&text(key)[..], &kind.to_le_bytes(), value].concat();
    let mut nested = entry("deep", 9, &[]);
    for _ in 0..200 {
        nested.extend([&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat());
    }
    nested.extend([&0u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat());
    let twice = entry("a", 0, &[1]);
    let cases = [
        (b"PK\x03\x04".to_vec(), "it does not begin with `GGUF`"),
        (start(1, 0, 0), "it has version 1, but only 2 and 3 are supported"),
        (start(4, 0, 0), "it has version 4, but only 2 and 3 are supported"),
        (start(3 << 24, 0, 0), "it is big-endian, but only little-endian files are supported"),
        (start(3, 1 << 60, 0), "the number of tensors is 1152921504606846976, but only 8 bytes are left"),
        (start(3, 0, 1), "the number of metadata entries is 1, but only 0 bytes are left"),
        ([start(3, 0, 1), entry("a", 13, &[0; 8])].concat(), "`a` has the unknown type 13"),
        (
            [start(3, 0, 1), entry("flag", 7, &[2])].concat(),
            "`flag` has the boolean 2, which is neither 0 nor 1",
        ),
        ([start(3, 0, 1), entry("s", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 255])].concat(), "s is not UTF-8"),
        ([start(3, 0, 2), twice.clone(), twice].concat(), "the metadata has `a` twice"),
        ([start(3, 0, 1), nested].concat(), "`deep` has arrays nested more than 8 deep"),
        (
            [start(3, 0, 1), entry("general.alignment", 4, &48u32.to_le_bytes())].concat(),
            "`general.alignment` must be a power of two up to 2^20",
        ),
        (
            [start(3, 2, 0), tensor("w", &[1], 0, 0), tensor("w", &[1], 0, 0), vec![0; 99]].concat(),
            "two tensors have the name `w`",
        ),
        (
            [start(3, 1, 0), tensor("w", &[1, 1, 1, 1, 1], 0, 0)].concat(),
            "`w` has 5 dimensions, but at most 4 are supported",
        ),
        (
            [start(3, 1, 0), tensor("w", &[1], 0, 33), vec![0; 99]].concat(),
            "`w` begins at byte 33, which is not a multiple of 32",
        ),
        (
            [start(3, 1, 0), tensor("w", &[33], 8, 0), vec![0; 99]].concat(),
            "`w` has a shape [33] that Q8_0 cannot have or that no memory holds",
        ),
        (
            [start(3, 1, 0), tensor("w", &[1 << 40, 1 << 40], 0, 0), vec![0; 99]].concat(),
            "`w` has a shape [1099511627776, 1099511627776] that F32 cannot have or that no memory holds",
        ),
        (
            [start(3, 1, 0), tensor("w", &[9], 0, 1 << 62), vec![0; 99]].concat(),
            "`w` needs 36 bytes from byte 4611686018427387904 of the tensors, which begin at byte 64; the file has 156",
        ),
    ];
    for (bytes, want) in cases {
        let error = parse(bytes).expect_err(want).to_string();
        let want = format!(
            "test is not a valid GGUF file: {want}; check that the download is complete and of this format"
        );
        assert_eq!(error, want);
    }
    // Valid: nested arrays that are not too deep, a tensor without dimensions, and a tensor of an
    // unknown type.
    let nested =
        [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &0u32.to_le_bytes(), &1u64.to_le_bytes(), &[7]]
            .concat();
    let bytes = [
        start(2, 2, 1),
        entry("a", 9, &nested),
        tensor("s", &[], 0, 0),
        tensor("t", &[7], 999, 32),
        vec![0; 64],
    ];
    let file = parse(bytes.concat()).expect("a file");
    assert_eq!(file.metadata("a"), Some(&Value::Array(Array::Array(vec![Array::U8(vec![7])]))));
    assert_eq!(file.tensor("s").expect("a number").to_f32(), [0.0]);
    assert!(matches!(file.tensor("t"), Err(Error::Type { .. })));
}
