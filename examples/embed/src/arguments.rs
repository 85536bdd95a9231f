//! Reads the command line, and the texts that it names.

use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use lexopt::prelude::{Long, Short, Value, ValueExt};
use minilm::SENTENCES;

use crate::picture::MOST;

const HELP: &str = "\
Computes sentence embeddings with all-MiniLM-L6-v2 on the GPU.

usage: embed [OPTIONS] [FILE | SENTENCE]...

A FILE gives one sentence per line; blank lines are skipped. Other arguments are sentences. Without arguments, it runs six default
sentences and compares them with stored vectors. The model reads at most 256 tokens of a sentence.

options:
  --search QUERY   print the sentences nearest to QUERY instead of a table of cosines
  --top N          the number of sentences to print with --search [default: 5]
  --out PATH       write the vectors as a safetensors file
  --picture PATH   draw the table of cosines as a PNG
  --sentence TEXT  use TEXT as a sentence, even if a file has that name
  --model FOLDER   read model.safetensors and tokenizer.json from FOLDER, without checking digests
  --repeat N       compute N times, to measure the speed without compilation [default: 1]
  -h, --help       print this text

environment:
  WGPU_ATTENTION_CACHE  folder for the weights [default: wgpu-attention in the user's cache]
  WGPU_BACKEND          vulkan, metal, dx12 or gl, as for every wgpu program";

pub struct Arguments {
    pub texts: Vec<String>,
    pub default_sentences: bool,
    pub search: Option<String>,
    pub top: usize,
    pub out: Option<PathBuf>,
    pub picture: Option<PathBuf>,
    pub model: Option<PathBuf>,
    pub repeat: usize,
}

impl Arguments {
    /// Reads the arguments. Returns `None` after it printed the help.
    pub fn read(to: &mut impl Write) -> Result<Option<Self>, Box<dyn Error>> {
        let mut this = Arguments {
            texts: Vec::new(),
            default_sentences: false,
            search: None,
            top: 5,
            out: None,
            picture: None,
            model: None,
            repeat: 1,
        };
        let mut parser = lexopt::Parser::from_env();
        while let Some(argument) = parser.next()? {
            match argument {
                Short('h') | Long("help") => {
                    writeln!(to, "{HELP}")?;
                    return Ok(None);
                }
                Long("search") => this.search = Some(sentence(parser.value()?.string()?, "--search")?),
                Long("top") => this.top = parser.value()?.parse()?,
                Long("out") => this.out = Some(parser.value()?.into()),
                Long("picture") => this.picture = Some(parser.value()?.into()),
                Long("sentence") => this.texts.push(sentence(parser.value()?.string()?, "--sentence")?),
                Long("model") => this.model = Some(parser.value()?.into()),
                Long("repeat") => this.repeat = parser.value()?.parse()?,
                Value(text) => {
                    let path = Path::new(&text);
                    if path.exists() {
                        this.texts.extend(lines(path)?);
                    } else {
                        this.texts.push(not_a_file(text.string()?)?);
                    }
                }
                _ => return Err(format!("{}; see --help", argument.unexpected()).into()),
            }
        }
        if this.repeat == 0 || this.top == 0 {
            return Err("--repeat and --top are at least 1".into());
        }
        if this.picture.is_some() && this.search.is_some() {
            return Err(
                "--picture draws the table of cosines, which --search leaves out: give one of the two".into(),
            );
        }
        // Check the outputs now, not after the work.
        for (option, path) in [("--out", &this.out), ("--picture", &this.picture)] {
            let Some(path) = path else { continue };
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
                return Err(format!("{option}: there is no folder {}", folder.display()).into());
            }
            if path.is_dir() || path.file_name().is_none() {
                return Err(format!("{option} is a file's name, {} is a folder", path.display()).into());
            }
        }
        if this.texts.is_empty() {
            this.default_sentences = this.search.is_none();
            this.texts = SENTENCES.map(str::to_owned).to_vec();
        }
        if this.picture.is_some() && this.texts.len() > MOST {
            let n = this.texts.len();
            return Err(format!(
                "--picture has room for {MOST} sentences, these are {n}; --out keeps all vectors"
            )
            .into());
        }
        Ok(Some(this))
    }
}

fn sentence(text: String, what: &str) -> Result<String, Box<dyn Error>> {
    if text.trim().is_empty() {
        return Err(format!("{what} is blank: give it a sentence, or the name of a file of sentences").into());
    }
    Ok(text)
}

/// Returns the text as a sentence. Returns an error if it looks like a file's name.
fn not_a_file(text: String) -> Result<String, Box<dyn Error>> {
    let path = Path::new(&text);
    let named = path
        .extension()
        .is_some_and(|e| ["txt", "md", "csv", "tsv", "rs", "json"].iter().any(|known| e == *known));
    if !text.contains(char::is_whitespace) && (named || path.components().count() > 1) {
        return Err(format!("there is no file {text}; if it is a sentence, say --sentence {text}").into());
    }
    sentence(text, "an argument")
}

/// Returns the lines of a text file that are not blank.
fn lines(path: &Path) -> Result<Vec<String>, Box<dyn Error>> {
    let shown = path.display();
    let bytes = fs::read(path).map_err(|e| format!("cannot read {shown}: {e}"))?;
    let text = String::from_utf8(bytes).map_err(|_| format!("{shown} is not UTF-8 text"))?;
    // Some editors write a byte order mark first.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let lines: Vec<String> =
        text.lines().map(str::trim).filter(|l| !l.is_empty()).map(str::to_owned).collect();
    if lines.is_empty() {
        return Err(format!("{shown} is empty: it needs a sentence on a line").into());
    }
    Ok(lines)
}
