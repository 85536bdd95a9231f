//! Converts text to tokens and back with the vocabulary in the model's file, and writes
//! conversations in the model's format.

use std::error::Error;

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, Tokenizer};
use wgpu_attention_models::{Array, Gguf};

const SYSTEM: &str = "You are a helpful AI assistant named SmolLM, trained by Hugging Face";
/// The `tokenizer.ggml.token_type` of control tokens, which represent no text.
const CONTROL: i32 = 3;

/// Builds the tokenizer of a GGUF file: byte-level BPE, with every numeric character separate.
pub fn tokenizer(file: &Gguf) -> Result<Tokenizer, Box<dyn Error>> {
    let kind = [file.str("tokenizer.ggml.model")?, file.str("tokenizer.ggml.pre")?];
    if kind != ["gpt2", "smollm"] {
        return Err(format!(
            "the file's tokenizer is {} of kind {}, not gpt2 of kind smollm",
            kind[0], kind[1]
        )
        .into());
    }
    let tokens = file.strings("tokenizer.ggml.tokens")?;
    let vocabulary: Vocab = tokens.iter().cloned().zip(0..).collect();
    let merge = |line: &String| -> Result<(String, String), Box<dyn Error>> {
        let (a, b) = line.split_once(' ').ok_or_else(|| format!("`{line}` is no pair of tokens"))?;
        Ok((a.to_string(), b.to_string()))
    };
    let merges: Merges =
        file.strings("tokenizer.ggml.merges")?.iter().map(merge).collect::<Result<_, _>>()?;
    let said = |e: tokenizers::Error| format!("the file's tokenizer: {e}");
    let mut tokenizer =
        Tokenizer::new(BPE::builder().vocab_and_merges(vocabulary, merges).build().map_err(said)?);
    let bytes = ByteLevel::new(false, true, true);
    let cuts = vec![PreTokenizerWrapper::Digits(Digits::new(true)), PreTokenizerWrapper::ByteLevel(bytes)];
    tokenizer.with_pre_tokenizer(Some(Sequence::new(cuts)));
    tokenizer.with_decoder(Some(bytes));
    let Array::I32(kinds) = file.array("tokenizer.ggml.token_type")? else {
        return Err("the types of the file's tokens are no numbers of 32 bits".into());
    };
    let special = tokens.iter().zip(kinds).filter(|(_, kind)| **kind == CONTROL);
    let special: Vec<_> = special.map(|(token, _)| AddedToken::from(token.as_str(), true)).collect();
    tokenizer.add_special_tokens(special).map_err(said)?;
    Ok(tokenizer)
}

/// Returns the tokens of a text, including control tokens.
pub fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, Box<dyn Error>> {
    let encoding = tokenizer.encode_fast(text, false).map_err(|e| format!("tokenizer: {e}"))?;
    Ok(encoding.get_ids().to_vec())
}

/// Returns a message in the format that the model was trained with.
fn message(role: &str, content: &str) -> String {
    format!("<|im_start|>{role}\n{content}<|im_end|>\n")
}

/// Returns the system message before a conversation; the default is the model's.
pub fn system(content: Option<&str>) -> String {
    message("system", content.unwrap_or(SYSTEM))
}

/// Returns a question, and the beginning of its answer.
pub fn question(content: &str) -> String {
    message("user", content) + "<|im_start|>assistant\n"
}
