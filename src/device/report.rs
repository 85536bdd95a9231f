//! What is known of the kernels on a device.

use std::fmt;

use super::Family;

/// What is known of a family of kernels on a device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Verdict {
    /// Nothing; plans use it.
    Unchecked,
    /// No plan for this device uses it, as far as the check's problems show.
    Unused,
    /// Right: its largest error was so much of what is permitted. Plans use it.
    Right {
        /// 1 is all that is permitted.
        share: f64,
    },
    /// Wrong, or it did not compile. Plans do without.
    Wrong {
        /// What came instead, or what wgpu said.
        why: String,
    },
    /// Plans do without, because the application said so:
    /// [`Pipelines::avoid`](crate::Pipelines::avoid).
    Avoided,
    /// Known to crash this driver or to lose its device, and so neither tried nor used.
    /// [`Pipelines::allow`] lifts it.
    ///
    /// [`Pipelines::allow`]: crate::Pipelines::allow
    Barred {
        /// What happens.
        what: &'static str,
        /// Where that is reported.
        source: &'static str,
    },
}

impl Verdict {
    /// Whether plans do without.
    pub fn is_aside(&self) -> bool {
        matches!(self, Verdict::Wrong { .. } | Verdict::Avoided | Verdict::Barred { .. })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Verdict::Unchecked => write!(f, "not checked"),
            Verdict::Unused => write!(f, "not used on this device"),
            Verdict::Right { share } => write!(f, "right, error {share:.2} of what is permitted"),
            Verdict::Wrong { why } => write!(f, "put aside: {why}"),
            Verdict::Avoided => write!(f, "put aside by the application"),
            Verdict::Barred { what, source } => write!(f, "barred: {what} ({source})"),
        }
    }
}

/// What is known of every family of kernels on a device: see
/// [`Pipelines::report`](crate::Pipelines::report). Printed, a line each.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    pub(crate) findings: Vec<(Family, Verdict)>,
}

impl Report {
    /// Every family, and what is known of it.
    pub fn findings(&self) -> impl Iterator<Item = (Family, &Verdict)> {
        self.findings.iter().map(|(family, verdict)| (*family, verdict))
    }

    /// What is known of `family`.
    pub fn verdict(&self, family: Family) -> &Verdict {
        self.findings
            .iter()
            .find(|(found, _)| *found == family)
            .map_or(&Verdict::Unchecked, |(_, verdict)| verdict)
    }

    /// The families that were found wrong.
    pub fn wrong(&self) -> impl Iterator<Item = Family> {
        self.findings()
            .filter(|(_, verdict)| matches!(verdict, Verdict::Wrong { .. }))
            .map(|(family, _)| family)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.findings().try_for_each(|(family, verdict)| writeln!(f, "{family:36} {verdict}"))
    }
}
