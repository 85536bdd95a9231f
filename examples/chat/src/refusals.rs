//! Tests with a made-up model of one layer: files of other models, prompts that do not fit, and
//! lost devices.

use std::io::BufReader;
use std::time::{Duration, Instant};

use wgpu_attention::Gpu;
use wgpu_attention::cache::CacheStorage;
use wgpu_attention_models::Gguf;

use crate::model::{Layout, Logits, Model, Session};
use crate::{line_of, room};

const WIDTH: u64 = 64;
const VOCABULARY: u64 = 40;

// The numbers of types in a GGUF file.
const F32: u32 = 0;
const Q4_1: u32 = 3;
const Q8_0: u32 = 8;

/// The contents of a GGUF file to write.
#[derive(Clone)]
struct File {
    /// Key, type and value.
    metadata: Vec<(String, u32, Vec<u8>)>,
    /// Name, shape (columns, then rows) and type.
    tensors: Vec<(String, Vec<u64>, u32)>,
}

impl File {
    fn tiny() -> Self {
        let mut file = File { metadata: Vec::new(), tensors: Vec::new() };
        file.text("general.architecture", "llama");
        for (key, value) in [
            ("block_count", 1),
            ("embedding_length", WIDTH as u32),
            ("feed_forward_length", 96),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("context_length", 64),
            ("rope.dimension_count", 32),
        ] {
            file.number(key, value);
        }
        file.float("rope.freq_base", 10000.0);
        file.float("attention.layer_norm_rms_epsilon", 1e-5);
        for (name, shape, kind) in [
            ("token_embd", vec![WIDTH, VOCABULARY], Q8_0),
            ("output_norm", vec![WIDTH], F32),
            ("blk.0.attn_norm", vec![WIDTH], F32),
            ("blk.0.attn_q", vec![WIDTH, 64], Q4_1),
            ("blk.0.attn_k", vec![WIDTH, 32], Q4_1),
            ("blk.0.attn_v", vec![WIDTH, 32], Q4_1),
            ("blk.0.attn_output", vec![64, WIDTH], Q4_1),
            ("blk.0.ffn_norm", vec![WIDTH], F32),
            ("blk.0.ffn_gate", vec![WIDTH, 96], Q4_1),
            ("blk.0.ffn_up", vec![WIDTH, 96], Q4_1),
            ("blk.0.ffn_down", vec![96, WIDTH], Q4_1),
        ] {
            file.tensors.push((format!("{name}.weight"), shape, kind));
        }
        file
    }

    fn put(&mut self, key: &str, kind: u32, value: Vec<u8>) {
        self.metadata.retain(|(own, ..)| own != key);
        self.metadata.push((key.into(), kind, value));
    }

    fn text(&mut self, key: &str, value: &str) {
        self.put(key, 8, [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat());
    }

    fn number(&mut self, key: &str, value: u32) {
        self.put(&format!("llama.{key}"), 4, value.to_le_bytes().into());
    }

    fn float(&mut self, key: &str, value: f32) {
        self.put(&format!("llama.{key}"), 6, value.to_le_bytes().into());
    }

    /// Replaces a tensor, to change its shape or type.
    fn tensor(&mut self, name: &str, shape: &[u64], kind: u32) {
        self.tensors.retain(|(own, ..)| own != name);
        self.tensors.push((name.into(), shape.into(), kind));
    }

    fn bytes(&self) -> Vec<u8> {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let mut head = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.metadata {
            head.extend([&text(key)[..], &kind.to_le_bytes(), value].concat());
        }
        let mut data = Vec::new();
        for (n, (name, shape, kind)) in self.tensors.iter().enumerate() {
            head.extend(text(name));
            head.extend((shape.len() as u32).to_le_bytes());
            shape.iter().for_each(|n| head.extend(n.to_le_bytes()));
            head.extend(kind.to_le_bytes());
            head.extend((data.len() as u64).to_le_bytes());
            let count = shape.iter().product::<u64>() as usize;
            match *kind {
                F32 => data.extend(1f32.to_le_bytes().repeat(count)),
                Q4_1 => data
                    .extend([[0, 0x24, 0, 0xa8].as_slice(), &[37 * n as u8; 16]].concat().repeat(count / 32)),
                _ => data.extend([[0, 0x24].as_slice(), &[91; 32]].concat().repeat(count / 32)),
            }
            data.resize(data.len().next_multiple_of(32), 0);
        }
        head.resize(head.len().next_multiple_of(32), 0);
        [head, data].concat()
    }

    fn model(&self, gpu: &Gpu) -> Result<Model, String> {
        let file = Gguf::from_bytes("tiny", self.bytes()).map_err(|e| e.to_string())?;
        Model::new(gpu, &file).map_err(|e| e.to_string())
    }
}

fn gpu() -> Gpu {
    Gpu::new().expect("a device: run the tests as `scripts/gpu cargo test --release -p chat`")
}

fn session(model: &Model, capacity: usize) -> Session<'_> {
    let layout = Layout { batch: 1, capacity, shared: 0, rows: 16, kind: CacheStorage::F16.into() };
    Session::new(model, layout).expect("a session")
}

#[test]
fn foreign_files_are_refused() {
    let gpu = gpu();
    let tiny = File::tiny();
    tiny.model(&gpu).expect("what is changed below is right before");
    type Change = fn(&mut File);
    let cases: [(Change, &str); 19] = [
        (|f| f.text("general.architecture", "bert"), "the file's architecture is bert, not llama"),
        (|f| f.metadata.clear(), "the metadata of tiny has no string `general.architecture`"),
        (
            |f| f.text("llama.block_count", "1"),
            "the metadata of tiny has no whole number `llama.block_count`; `llama.block_count` is a string",
        ),
        (|f| f.number("block_count", 2), "no tensor `blk.1.attn_norm.weight` in tiny"),
        (|f| f.number("block_count", 0), "the file's model has no layers"),
        (|f| f.number("attention.head_count", 3), "3 heads do not share 64 channels"),
        (|f| f.number("attention.head_count", 0), "0 heads do not share 64 channels"),
        (|f| f.number("attention.head_count_kv", 0), "has shape [32, 64], but the model needs [0, 64]"),
        (|f| f.number("attention.head_count_kv", u32::MAX), "has shape [32, 64], but the model needs ["),
        (
            |f| f.number("embedding_length", 128),
            "`token_embd.weight` has shape [40, 64], but the model needs [40, 128]",
        ),
        (|f| f.number("rope.dimension_count", 31), "31"),
        (|f| f.number("rope.dimension_count", 64), "64 rotary channels for heads of 32"),
        (|f| f.float("rope.freq_base", f32::NAN), "NaN"),
        (|f| f.float("attention.layer_norm_rms_epsilon", -1.0), "-1"),
        (|f| f.text("llama.rope.scaling.type", "yarn"), "the file scales its rotary positions"),
        (|f| f.tensor("output.weight", &[64, 40], Q8_0), "an output matrix besides its embeddings"),
        (
            |f| f.tensor("blk.0.attn_k.weight", &[64, 64], Q4_1),
            "`blk.0.attn_k.weight` has shape [64, 64], but the model needs [32, 64]",
        ),
        (
            |f| f.tensor("blk.0.ffn_down.weight", &[96, 64], F32),
            "`blk.0.ffn_down.weight` is stored as F32, not as Q4_1 or Q8_0",
        ),
        (
            |f| f.tensor("blk.0.attn_v.weight", &[64, 32], Q8_0),
            "`blk.0.attn_v.weight` is stored in another way than its neighbours",
        ),
    ];
    for (change, want) in cases {
        let mut file = tiny.clone();
        change(&mut file);
        match file.model(&gpu) {
            Ok(_) => panic!("taken, not refused: {want}"),
            Err(error) => assert!(error.contains(want), "{want}: {error}"),
        }
    }

    // A file that is cut off anywhere is an error.
    let bytes = tiny.bytes();
    for len in (0..bytes.len()).step_by(61) {
        let error =
            Gguf::from_bytes("tiny", bytes[..len].into()).map(|_| len).expect_err("cut off").to_string();
        assert!(error.starts_with("tiny is not a valid GGUF file: "), "{error}");
    }
}

#[test]
fn prompts_have_room_for_an_answer() {
    assert_eq!(room(0, 5, 8).expect("room"), 3);
    assert_eq!(room(6, 1, 8).expect("room"), 1);
    let error = |had, new| room(had, new, 8).expect_err("none").to_string();
    assert_eq!(error(0, 0), "the prompt is empty");
    assert_eq!(
        error(0, 9),
        "the prompt's 9 tokens leave no room for an answer in a context of 8: see --context"
    );
    assert_eq!(
        error(6, 2),
        "the conversation's 8 tokens leave no room for an answer in a context of 8: see --context"
    );
}

#[test]
fn a_full_context_is_an_error_and_changes_nothing() {
    let model = File::tiny().model(&gpu()).expect("a model");
    let mut session = session(&model, 8);
    session.feed(&[&[1, 2, 3, 4, 5]]).expect("five of eight");
    let mut again = || session.feed(&[&[1, 2, 3, 4]]).map(|_| ()).expect_err("nine of eight").to_string();
    let error = again();
    assert!(error.contains("capacity"), "{error}");
    assert_eq!(again(), error);
    assert_eq!(session.len(0), 5);
    let logits = session.feed(&[&[1, 2, 3]]).expect("eight of eight").remove(0);
    assert!(logits.len() == VOCABULARY as usize && logits.iter().all(|x| x.is_finite()));
    assert_eq!(session.len(0), 8);
}

#[test]
fn a_device_lost_while_generating_is_an_error() {
    let gpu = gpu();
    let model = File::tiny().model(&gpu).expect("a model");
    let mut session = session(&model, 32);
    session.feed(&[&[1, 2, 3]]).expect("a prompt");
    session.feed(&[&[4]]).expect("a token");
    gpu.device().destroy();
    // Both the first call and later calls return the error.
    for wanted in [Logits::Last, Logits::Last, Logits::All] {
        let Err(error) = session.step(&[&[5]], wanted) else { panic!("{wanted:?}: no error") };
        let error = error.to_string();
        assert!(error.contains("device") && error.contains("lost"), "{wanted:?}: {error}");
    }
    // A step without logits may succeed; the next one must return the error.
    let _ = session.step(&[&[5]], Logits::None);
    let error = session.feed(&[&[5; 20]]).map(|_| ()).expect_err("no device").to_string();
    assert!(error.contains("lost"), "{error}");
    let error = session.warm_up().expect_err("no device").to_string();
    assert!(error.contains("lost"), "{error}");
    let error = File::tiny().model(&gpu).map(|_| ()).expect_err("no device");
    assert!(error.contains("lost"), "{error}");
}

/// The other thread destroys the device during any of the steps.
#[test]
fn a_device_destroyed_by_another_thread_is_an_error() {
    let gpu = gpu();
    let model = File::tiny().model(&gpu).expect("a model");
    let mut session = session(&model, 64);
    session.warm_up().expect("kernels");
    let device = gpu.device().clone();
    let destroyer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        device.destroy();
    });
    let started = Instant::now();
    let error = loop {
        let all = (0..60).try_for_each(|id| session.feed(&[&[id % 40]]).map(|_| ()));
        if let Err(error) = all.and_then(|()| session.clear()) {
            break error.to_string();
        }
        assert!(started.elapsed() < Duration::from_secs(60), "nobody says that the device is lost");
    };
    destroyer.join().expect("no panic");
    assert!(error.contains("lost"), "{error}");
}

#[test]
fn standard_input_is_text() {
    let mut input = BufReader::with_capacity(3, &b"Gr\xc3\xbc\xc3\x9fe\r\n\nlast"[..]);
    for want in [Some("Grüße"), Some(""), Some("last"), None] {
        assert_eq!(line_of(&mut input).expect("text").as_deref(), want);
    }
    let error = line_of(&mut &b"a\xff\n"[..]).expect_err("not text").to_string();
    assert_eq!(error, "standard input is not UTF-8 text");
}
