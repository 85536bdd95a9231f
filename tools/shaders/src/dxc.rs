//! Checks naga's HLSL with Microsoft's DXC, with wgpu's arguments. DXC validates its output, and
//! cannot sign it here.

use std::path::Path;

use crate::verdict::Verdict;

/// The compiler of one thread.
pub struct Dxc {
    compiler: hassle_rs::DxcCompiler,
    library: hassle_rs::DxcLibrary,
    // This field comes last, so that the library is unloaded last.
    _dxc: hassle_rs::Dxc,
}

impl Dxc {
    pub fn new(library: &Path) -> hassle_rs::Result<Self> {
        let dxc = hassle_rs::Dxc::new(Some(library.to_path_buf()))?;
        Ok(Dxc { compiler: dxc.create_compiler()?, library: dxc.create_library()?, _dxc: dxc })
    }

    pub fn check(&self, hlsl: &str, halves: bool) -> Verdict {
        match self.messages(hlsl, halves) {
            Ok(messages) if messages.is_empty() => Verdict::Accepted,
            Ok(messages) => Verdict::Rejected(messages),
            Err(error) => Verdict::Rejected(error.to_string()),
        }
    }

    /// Returns DXC's messages; empty if it accepts the text.
    fn messages(&self, hlsl: &str, halves: bool) -> hassle_rs::Result<String> {
        let mut arguments = vec!["-HV", "2018", "-no-warnings", "-Ges"];
        if halves {
            arguments.push("-enable-16bit-types");
        }
        let profile = if halves { "cs_6_2" } else { "cs_6_0" };
        let blob = self.library.create_blob_with_encoding_from_str(hlsl)?;
        let compiled = self.compiler.compile(&blob, "kernel.hlsl", "main", profile, &arguments, None, &[]);
        let (result, failed) = match compiled {
            Ok(result) => (result, false),
            Err((result, _)) => (result, true),
        };
        let messages = self.library.get_blob_as_string(&result.get_error_buffer()?.into())?;
        let unsigned = |line: &&str| !line.starts_with("warning: DXIL signing library");
        let messages =
            messages.trim_end_matches('\0').lines().filter(unsigned).collect::<Vec<_>>().join("\n");
        Ok(if failed && messages.is_empty() { "failed without a message".into() } else { messages })
    }
}
