
/// Chooses a fault, and records the faults and shaders that each test reaches. `tools/mutation`
/// appends this file to the copy of `src/lib.rs`.
mod mutation {
    use std::collections::{HashMap, HashSet};
    use std::fs::{File, OpenOptions};
    use std::io::Write;
    use std::sync::{LazyLock, Mutex};

    use crate::kernel::KernelVariant;
    use crate::kernel::texts::TEXTS;

    static CHOSEN: LazyLock<Option<usize>> =
        LazyLock::new(|| std::env::var("WGPU_ATTENTION_MUTANT").ok()?.parse().ok());

    /// The lines that were written, and their file.
    static REACHED: LazyLock<Option<Mutex<(HashSet<String>, File)>>> = LazyLock::new(|| {
        let path = std::env::var_os("WGPU_ATTENTION_REACHED")?;
        let file = OpenOptions::new().create(true).append(true).open(path).ok()?;
        Some(Mutex::new((HashSet::new(), file)))
    });

    /// True if the environment chooses the n-th fault.
    pub(crate) fn mutant(n: usize) -> bool {
        if REACHED.is_some() {
            reached(&n.to_string());
        }
        *CHOSEN == Some(n)
    }

    fn reached(what: &str) {
        let Some(state) = &*REACHED else { return };
        let line = format!("{}\t{what}", std::thread::current().name().unwrap_or("?"));
        let Ok(mut state) = state.lock() else { return };
        if state.0.insert(line.clone()) {
            let _ = state.1.write_all((line + "\n").as_bytes());
        }
    }

    /// Records the first lines of the kernel's shaders.
    pub(crate) fn reached_kernel(variant: &KernelVariant) {
        static FIRST_LINES: Mutex<Option<HashMap<KernelVariant, Vec<&'static str>>>> = Mutex::new(None);
        if REACHED.is_none() {
            return;
        }
        let Ok(mut known) = FIRST_LINES.lock() else { return };
        let known = known.get_or_insert_default();
        let lines = known.entry(variant.clone()).or_insert_with(|| {
            let wgsl = variant.describe().wgsl;
            TEXTS.iter().filter_map(|text| text.lines().next()).filter(|line| wgsl.contains(line)).collect()
        });
        lines.iter().for_each(|line| reached(line));
    }
}
