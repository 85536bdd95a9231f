//! Compares the model with stored results of transformers in f64. Without the weights, the tests
//! print a line and pass.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use minilm::{Files, HEADS, LAYERS, LONGEST, Model, SENTENCES, Tokenizer, Tokens, WIDTH, cosine};
use safetensors::tensor::{Dtype, TensorView, serialize};
use wgpu_attention::Gpu;
use wgpu_attention_models::Safetensors;

use crate::{STORED, TOLERANCE, difference, print_found, print_table, save, stored, write_whole};

/// The tolerance of hidden states, whose values reach 10.
const HIDDEN_TOLERANCE: f64 = 2e-5;

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(STORED)
}

fn files() -> Option<Files> {
    // Download once, not once for every test.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // `eprintln` would be hidden in passing tests.
    Files::cached().map_err(|e| writeln!(std::io::stderr(), "skipped, the weights cannot be had: {e}")).ok()
}

fn gpu() -> Gpu {
    Gpu::new().expect("a device: run with scripts/gpu")
}

fn tokens<S: AsRef<str> + Sync>(files: &Files, sentences: &[S]) -> Vec<Tokens> {
    let tokenizer = Tokenizer::new(&files.tokenizer).and_then(|t| t.truncated(LONGEST)).expect("a tokenizer");
    tokenizer.tokens(sentences).expect("tokens")
}

#[test]
fn hidden_states_embeddings_and_similarities_are_the_stored_ones() {
    let Some(files) = files() else { return };
    let (gpu, tokens) = (gpu(), tokens(&files, &SENTENCES));
    let mut model = Model::new(&gpu, &files.weights, &tokens).expect("a model");

    let truth = Safetensors::open(path()).expect("the stored file");
    let want = |n: usize| -> Vec<f64> {
        let rows = truth.tensor(&format!("hidden{n}")).expect("there").to_f32();
        rows.into_iter().map(f64::from).collect()
    };
    let hidden = model.hidden(&tokens).expect("hidden states");
    let layers = hidden.chunks_exact(hidden.len() / (LAYERS + 1));
    let mut compared = 0;
    for (n, got) in layers.enumerate() {
        let want = want(n);
        assert_eq!(got.len(), want.len());
        let worst = difference(got, &want);
        println!("hidden{n}: {worst:.1e}");
        assert!(worst <= HIDDEN_TOLERANCE, "hidden{n}: {worst:e}");
        compared += 1;
    }
    assert_eq!(compared, LAYERS + 1);

    let vectors = model.embed(&tokens, |_| ()).expect("vectors");
    let n = SENTENCES.len();
    let worst = difference(&vectors, &stored(&path(), "embedding", n * WIDTH).expect("there"));
    println!("embedding: {worst:.1e}");
    assert!(worst <= TOLERANCE, "{worst:e}");
    let rows = || vectors.chunks_exact(WIDTH);
    let cosines: Vec<f32> = rows().flat_map(|a| rows().map(move |b| cosine(a, b) as f32)).collect();
    assert_eq!(cosines.len(), n * n);
    let worst = difference(&cosines, &stored(&path(), "similarity", n * n).expect("there"));
    println!("similarity: {worst:.1e}");
    assert!(worst <= TOLERANCE, "{worst:e}");
}

#[test]
fn maps_are_the_stored_ones_and_vectors_those_without_them() {
    let Some(files) = files() else { return };
    let (gpu, tokens) = (gpu(), tokens(&files, &SENTENCES));
    let mut model = Model::with_room(&gpu, &files.weights, LONGEST).expect("a model");
    // The stored weights are of this sentence.
    let sentence = &tokens[2];
    let n = sentence.ids.len();
    let maps = model.maps(sentence).expect("maps");
    assert_eq!(maps.weights.len(), LAYERS * HEADS * n * n);
    let truth = Safetensors::open(path()).expect("the stored file");
    let want: Vec<f64> =
        truth.tensor("l5.weights").expect("there").to_f32().into_iter().map(f64::from).collect();
    let worst = difference(&maps.weights[(LAYERS - 1) * HEADS * n * n..], &want);
    println!("l5.weights: {worst:.1e}");
    assert!(worst <= TOLERANCE, "{worst:e}");
    // The other layers' rows are probabilities that differ from the last layer's.
    for row in maps.weights.chunks_exact(n) {
        let sum: f64 = row.iter().map(|x| f64::from(*x)).sum();
        assert!((sum - 1.0).abs() < 1e-5 && row.iter().all(|x| *x >= 0.0), "{row:?}");
    }
    let layers: Vec<&[f32]> = maps.weights.chunks_exact(HEADS * n * n).collect();
    assert!(layers[..LAYERS - 1].iter().all(|layer| difference(layer, &want) > 0.1));
    let want: Vec<f64> =
        model.embed(&tokens[2..3], |_| ()).expect("a vector").into_iter().map(f64::from).collect();
    let worst = difference(&maps.vector, &want);
    assert!(worst <= 2e-6, "{worst:e}");
    let long = Tokens { ids: vec![101; LONGEST + 1], texts: Vec::new() };
    let error = model.maps(&long).expect_err("no room").to_string();
    assert_eq!(error, "a sentence of 257 tokens: room for 256");
}

#[test]
fn batches_do_not_change_vectors() {
    let Some(files) = files() else { return };
    // Several full batches and a partial one. Sentences have 3 to 256 tokens, and one is cut off.
    let sentences: Vec<String> = (0..120)
        .map(|n| if n == 60 { "word ".repeat(400) } else { format!("{} {n}", "some words ".repeat(n % 60)) })
        .collect();
    let tokens = tokens(&files, &sentences);
    assert_eq!(tokens[60].ids.len(), LONGEST);
    assert_eq!(tokens[60].ids.last(), Some(&102), "[SEP] is kept");
    let (gpu, mut done) = (gpu(), Vec::new());
    let mut model = Model::new(&gpu, &files.weights, &tokens).expect("a model");
    let together = model.embed(&tokens, |n| done.push(n)).expect("vectors");
    assert!(done.len() > 1 && done.last() == Some(&sentences.len()), "{done:?}");
    // The model reads only the first 254 words of a long sentence, between [CLS] and [SEP].
    let read = self::tokens(&files, &["word ".repeat(LONGEST - 2), "word ".repeat(LONGEST - 3)]);
    assert_eq!(read[0], tokens[60]);
    assert_ne!(read[1], tokens[60]);
    for n in [0, 59, 60, 61, 119] {
        let alone = model.embed(&tokens[n..=n], |_| ()).expect("a vector");
        let want: Vec<f64> = alone.iter().map(|x| f64::from(*x)).collect();
        let worst = difference(&together[n * WIDTH..][..WIDTH], &want);
        assert!(worst <= 2e-6, "sentence {n}: {worst:e}");
    }
}

#[test]
fn weights_of_another_model_are_refused() {
    let Some(files) = files() else { return };
    let tokens = tokens(&files, &["one"]);
    let other = Safetensors::open(path()).expect("a file without weights");
    let error = Model::new(&gpu(), &other, &tokens).map(|_| ()).expect_err("no weights").to_string();
    assert!(error.starts_with("no tensor `encoder.layer.0.attention.self.query.weight` in "), "{error}");

    // A file with this model's names, but another size.
    let zeros = [0; 8 * 8 * 4];
    let parts = ["self.query", "self.key", "self.value", "output.dense"];
    let small = parts.map(|part| {
        let view = TensorView::new(Dtype::F32, vec![8, 8], &zeros).expect("a tensor");
        (format!("encoder.layer.0.attention.{part}.weight"), view)
    });
    let small = serialize(small, None).expect("a file");
    let small = Safetensors::from_bytes("small", small).expect("a file");
    let error = Model::new(&gpu(), &small, &tokens).map(|_| ()).expect_err("another size").to_string();
    assert_eq!(
        error,
        "`encoder.layer.0.attention.self.query.weight` has shape [8, 8], but the model needs [384, 384]; check that \
         the file belongs to this model"
    );
    assert_eq!(difference(&[f32::NAN], &[0.0]), f64::INFINITY);
    assert_eq!(difference(&[], &[0.0]), f64::INFINITY);
    assert_eq!(difference(&[1.0, 2.0], &[1.0, 2.5]), 0.5);
}

#[test]
fn tokens_that_the_model_does_not_have_are_refused() {
    let Some(files) = files() else { return };
    let gpu = gpu();
    let mut model = Model::with_room(&gpu, &files.weights, 2 * LONGEST + 2).expect("a model");
    let sentence = |ids: Vec<u32>| [Tokens { ids, texts: Vec::new() }];
    let mut refused = |ids| model.embed(&sentence(ids), |_| ()).expect_err("refused").to_string();
    assert_eq!(
        refused(vec![101, 30_522, 102]),
        "token 30522 has no embedding, the weights have 30522: are they and tokenizer.json of one model?"
    );
    assert_eq!(refused(vec![101; 513]), "a sentence has 513 tokens, the model reads 512");
    assert_eq!(refused(vec![101; 515]), "a sentence of 515 tokens: room for 514");
    // The model still works after the errors.
    assert_eq!(model.embed(&sentence(vec![101, 30_521, 102]), |_| ()).expect("a vector").len(), WIDTH);
    assert!(model.embed(&[], |_| ()).expect("of nothing").is_empty());
}

#[test]
fn a_lost_device_is_said() {
    let Some(files) = files() else { return };
    let (gpu, tokens) = (gpu(), tokens(&files, &SENTENCES));
    let mut model = Model::new(&gpu, &files.weights, &tokens).expect("a model");
    model.embed(&tokens, |_| ()).expect("vectors");
    gpu.device().destroy();
    let error = model.embed(&tokens, |_| ()).expect_err("no device").to_string();
    assert!(error.starts_with("the device is lost or did not answer: "), "{error}");
    let error = model.maps(&tokens[0]).expect_err("no device").to_string();
    assert!(error.starts_with("the device is lost or did not answer: "), "{error}");
    let error = Model::new(&gpu, &files.weights, &tokens).map(|_| ()).expect_err("no device").to_string();
    assert!(error.starts_with("the device is lost or did not answer: "), "{error}");
}

#[test]
fn search_results_are_sorted() {
    let texts = ["far", "near", "nearest", "as near", "away"].map(str::to_owned);
    let vector = |x: f32| {
        let mut vector = [0f32; WIDTH];
        vector[..2].copy_from_slice(&[x, (1.0 - x * x).sqrt()]);
        vector
    };
    let query = vector(1.0);
    let vectors = [0.1, 0.5, 0.9, 0.5, -0.5].map(vector);
    let all = [&vectors[..], &[query]].concat().concat();
    let printed = |top| {
        let mut to = Vec::new();
        print_found("a query", &texts, &all, top, &mut to).expect("written");
        String::from_utf8(to).expect("text")
    };
    let first =
        "\nnearest to \"a query\"\n  0.900      3  nearest\n  0.500      2  near\n  0.500      4  as near\n";
    assert_eq!(printed(3), first);
    assert_eq!(printed(100), format!("{first}  0.100      1  far\n -0.500      5  away\n"));
    let mut to = Vec::new();
    print_table(&texts, &all[..texts.len() * WIDTH], &mut to).expect("written");
    let table = String::from_utf8(to).expect("text");
    assert!(table.contains("\ncosine      1      2      3      4      5\n"), "{table}");
    assert!(table.contains("\n     2  0.912  1.000  0.827  1.000  0.500\n"), "{table}");
}

#[test]
fn files_are_written_whole_or_not() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let path = folder.path().join("vectors.safetensors");
    for vectors in [vec![1.0; WIDTH], vec![2.0; 3 * WIDTH]] {
        save(&path, &vectors).expect("written");
        let file = Safetensors::open(&path).expect("a file");
        let tensor = file.tensor("embeddings").expect("there");
        assert_eq!(tensor.shape(), [vectors.len() / WIDTH, WIDTH]);
        assert_eq!(tensor.to_f32(), vectors);
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
    // A folder has the name of the temporary file.
    std::fs::create_dir(folder.path().join("taken.part")).expect("made");
    let taken = folder.path().join("taken");
    std::fs::write(&taken, "before").expect("written");
    let error = write_whole(&taken, b"after").expect_err("taken").to_string();
    assert!(error.starts_with(&format!("cannot write {}: ", taken.display())), "{error}");
    assert_eq!(std::fs::read(&taken).expect("there"), b"before");
    #[cfg(target_os = "linux")]
    {
        let error = write_whole("/dev/full".as_ref(), b"x").expect_err("full").to_string();
        assert!(error.starts_with("cannot write /dev/full: "), "{error}");
        write_whole("/dev/null".as_ref(), b"x").expect("written");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&taken, &link).expect("a link");
        std::fs::remove_dir(folder.path().join("taken.part")).expect("gone");
        write_whole(&link, b"through").expect("written");
        assert!(link.is_symlink());
        assert_eq!(std::fs::read(&taken).expect("there"), b"through");
    }
}
