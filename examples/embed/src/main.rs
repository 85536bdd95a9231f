//! Computes sentence embeddings with a real model, all-MiniLM-L6-v2, entirely on the GPU. Prints a
//! table of cosines, or searches text files.
//!
//! `cargo run --release -p embed -- "A cat sits on the mat." "It rained all day."`
//! `cargo run --release -p embed -- --search "how are weights normalised" notes.txt`
//! `cargo run --release -p embed -- --picture cosines.png sentences.txt`
//!
//! The first run downloads the weights with pip into a cache.

mod arguments;
mod picture;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::fs;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use arguments::Arguments;
use canvas::shortened;
use minilm::{Files, LONGEST, Model, Tokenizer, Tokens, WIDTH, cosine};
use safetensors::tensor::{Dtype, TensorView, serialize};
use wgpu_attention::Gpu;

const STORED: &str = "data/encoder_minilm_default.safetensors";
/// The largest allowed difference between embeddings and the stored ones.
const TOLERANCE: f64 = 1e-5;
/// The largest number of sentences in a printed table.
const TABLE: usize = 16;
const COLUMN: usize = 40;

fn main() -> ExitCode {
    let mut to = io::stdout().lock();
    match Arguments::read(&mut to).and_then(|arguments| arguments.map_or(Ok(()), |a| run(&a, &mut to))) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader closed the pipe, as in `| head`.
        Err(e) if e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => {
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments, to: &mut impl Write) -> Result<(), Box<dyn Error>> {
    let files = match &arguments.model {
        Some(folder) => Files::open(folder)?,
        None => Files::cached()?,
    };
    writeln!(to, "weights   {}", files.folder.display())?;
    // The query, if there is one, comes last.
    let texts = &arguments.texts;
    let all: Vec<&String> = texts.iter().chain(&arguments.search).collect();
    let tokenizer = Tokenizer::new(&files.tokenizer)?.truncated(LONGEST)?;
    let started = Instant::now();
    let tokens = tokenizer.tokens(&all)?;
    let tokenised = started.elapsed();
    let count: usize = tokens.iter().map(|t| t.ids.len()).sum();
    let plural = if all.len() == 1 { "" } else { "s" };
    writeln!(to, "input     {} sentence{plural}, {count} tokens", all.len())?;
    let cut = tokens.iter().filter(|t| t.ids.len() == LONGEST).count();
    if cut > 0 {
        writeln!(
            to,
            "          {cut} of them fill or exceed {LONGEST} tokens; the model reads no more of a sentence"
        )?;
    }

    let gpu = Gpu::new()?;
    let info = gpu.device().adapter_info();
    writeln!(to, "adapter   {} ({}, {:?}) {}", info.name, info.backend, info.device_type, info.driver_info)?;
    let mut model = Model::new(&gpu, &files.weights, &tokens)?;
    let mut vectors = Vec::new();
    for run in 1..=arguments.repeat {
        let started = Instant::now();
        vectors = model.embed(&tokens, progress(all.len()))?;
        let seconds = (tokenised + started.elapsed()).as_secs_f64();
        let compiled = if run == 1 { ", with the compilation of kernels" } else { "" };
        let rate = all.len() as f64 / seconds;
        writeln!(to, "time      {seconds:.3} s: {rate:.1} sentences/s, tokens to vectors{compiled}")?;
    }

    if arguments.default_sentences && arguments.model.is_none() {
        compare_with_stored(&tokens, &vectors, to)?;
    }
    if let Some(out) = &arguments.out {
        save(out, &vectors[..texts.len() * WIDTH])?;
        writeln!(to, "vectors   {} (safetensors, `embeddings` [{}, {WIDTH}])", out.display(), texts.len())?;
    }
    if let Some(path) = &arguments.picture {
        let rows = || vectors.chunks_exact(WIDTH);
        let cosines: Vec<f64> = rows().flat_map(|a| rows().map(move |b| cosine(a, b))).collect();
        write_whole(path, &picture::png(texts, &cosines)?)?;
        writeln!(to, "picture   {}", path.display())?;
    }
    match &arguments.search {
        Some(query) => print_found(query, texts, &vectors, arguments.top, to)?,
        None => print_table(texts, &vectors, to)?,
    }
    Ok(())
}

/// Shows the progress of a long run on a terminal.
fn progress(all: usize) -> impl FnMut(usize) {
    let shown = std::io::stderr().is_terminal();
    let started = Instant::now();
    move |done| {
        if shown {
            let rate = done as f64 / started.elapsed().as_secs_f64();
            eprint!("\r{done} of {all} sentences, {rate:.0}/s ");
            if done == all {
                eprint!("\r{:60}\r", "");
            }
            let _ = std::io::stderr().flush();
        }
    }
}

/// Compares with the stored results of transformers, if the file exists.
fn compare_with_stored(
    tokens: &[Tokens],
    vectors: &[f32],
    to: &mut impl Write,
) -> Result<(), Box<dyn Error>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(STORED);
    if !path.exists() {
        writeln!(to, "\nNo {}: the comparison with stored vectors is skipped.", path.display())?;
        return Ok(());
    }
    let worst = difference(vectors, &stored(&path, "embedding", tokens.len() * WIDTH)?);
    writeln!(
        to,
        "stored    embeddings differ from those in f64 by {worst:.1e} at most (allowed {TOLERANCE:.0e})"
    )?;
    if worst <= TOLERANCE { Ok(()) } else { Err("the embeddings are not those that are stored".into()) }
}

/// Reads a tensor of `n` f64 values from the stored file.
fn stored(path: &Path, name: &str, n: usize) -> Result<Vec<f64>, Box<dyn Error>> {
    let bytes = fs::read(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
    let file = safetensors::SafeTensors::deserialize(&bytes)?;
    let tensor = file.tensor(name)?;
    let eights = tensor.data().as_chunks().0;
    if tensor.dtype() != Dtype::F64 || eights.len() != n {
        return Err(format!("`{name}` in {} is not {n} numbers of 64 bits", path.display()).into());
    }
    Ok(eights.iter().map(|eight| f64::from_le_bytes(*eight)).collect())
}

/// Returns the largest difference; infinite for NaN or different lengths.
fn difference(got: &[f32], want: &[f64]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let differences = got.iter().zip(want).map(|(got, want)| (f64::from(*got) - want).abs());
    differences.fold(0.0, |a, b| if b.is_nan() { f64::INFINITY } else { a.max(b) })
}

fn save(path: &Path, vectors: &[f32]) -> Result<(), Box<dyn Error>> {
    let shape = vec![vectors.len() / WIDTH, WIDTH];
    let bytes: Vec<u8> = vectors.iter().flat_map(|x| x.to_le_bytes()).collect();
    let file = serialize([("embeddings", TensorView::new(Dtype::F32, shape, &bytes)?)], None)?;
    write_whole(path, &file)
}

/// Writes a temporary file and renames it, so that a failure leaves the old file unchanged.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    let failed = |e| format!("cannot write {}: {e}", path.display());
    // Follow links. Write directly to devices and pipes, which cannot be replaced.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    if target.exists() && !target.is_file() {
        return Ok(fs::write(target, bytes).map_err(failed)?);
    }
    let part = target.with_added_extension("part");
    let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, &target));
    if written.is_err() {
        // The temporary file may not exist: ignore the error.
        let _ = fs::remove_file(&part);
    }
    Ok(written.map_err(failed)?)
}

fn print_table(texts: &[String], vectors: &[f32], to: &mut impl Write) -> io::Result<()> {
    writeln!(to)?;
    let rows: Vec<&[f32]> = vectors.chunks_exact(WIDTH).collect();
    for (n, (text, row)) in texts.iter().zip(&rows).enumerate() {
        let first: Vec<String> = row.iter().take(4).map(|x| format!("{x:+.4}")).collect();
        writeln!(to, "{:>4}  {:<COLUMN$}  [{}, ..]", n + 1, shortened(text, COLUMN), first.join(", "))?;
        if n + 1 == TABLE && texts.len() > TABLE {
            writeln!(to, "      and {} more; --out keeps them all", texts.len() - TABLE)?;
            return Ok(());
        }
    }
    write!(to, "\ncosine")?;
    for n in 1..=rows.len() {
        write!(to, "{n:>7}")?;
    }
    writeln!(to)?;
    for (n, a) in rows.iter().enumerate() {
        write!(to, "{:>6}", n + 1)?;
        for b in &rows {
            write!(to, "{:>7.3}", cosine(a, b))?;
        }
        writeln!(to)?;
    }
    Ok(())
}

/// Prints the texts nearest to the query. The query's vector is the last.
fn print_found(
    query: &str,
    texts: &[String],
    vectors: &[f32],
    top: usize,
    to: &mut impl Write,
) -> io::Result<()> {
    let (vectors, wanted) = vectors.split_at(texts.len() * WIDTH);
    let cosines = vectors.chunks_exact(WIDTH).map(|vector| cosine(vector, wanted));
    let mut found: Vec<(usize, f64)> = cosines.enumerate().collect();
    found.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    writeln!(to, "\nnearest to \"{}\"", shortened(query, 2 * COLUMN))?;
    for (n, cosine) in found.into_iter().take(top) {
        writeln!(to, "{cosine:>7.3}  {:>5}  {}", n + 1, shortened(&texts[n], 100))?;
    }
    Ok(())
}
