//! The state of each family of kernels on a device.

use std::fmt;

use super::Family;

/// The state of a family of kernels on a device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Verdict {
    /// Not checked; plans use it.
    Unchecked,
    /// No plan for this device uses it, as far as the check's problems show.
    Unused,
    /// Right. Plans use it.
    Right {
        /// The largest error as a share of the permitted error; 1 is the limit.
        share: f64,
    },
    /// Wrong, or it did not compile. Plans avoid it.
    Wrong {
        /// The wrong value, or wgpu's message.
        why: String,
    },
    /// Disabled by the application with [`Pipelines::avoid`](crate::Pipelines::avoid). Plans avoid
    /// it.
    Avoided,
    /// Known to crash this driver or to lose its device. The check does not try it and plans avoid
    /// it. [`Pipelines::allow`] lifts the bar.
    ///
    /// [`Pipelines::allow`]: crate::Pipelines::allow
    Barred {
        /// The fault that happens.
        what: &'static str,
        /// The source of the report.
        source: &'static str,
    },
}

impl Verdict {
    /// True if plans avoid the family.
    pub fn is_disabled(&self) -> bool {
        matches!(self, Verdict::Wrong { .. } | Verdict::Avoided | Verdict::Barred { .. })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Verdict::Unchecked => write!(f, "not checked"),
            Verdict::Unused => write!(f, "not used on this device"),
            Verdict::Right { share } => write!(f, "right, error {share:.2} of the tolerance"),
            Verdict::Wrong { why } => write!(f, "disabled: {why}"),
            Verdict::Avoided => write!(f, "disabled by the application"),
            Verdict::Barred { what, source } => write!(f, "disabled on this driver: {what} ({source})"),
        }
    }
}

/// The state of every family of kernels on a device: see
/// [`Pipelines::report`](crate::Pipelines::report). `Display` prints a line for each family.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    pub(crate) findings: Vec<(Family, Verdict)>,
}

impl Report {
    /// Returns every family with its state.
    pub fn findings(&self) -> impl Iterator<Item = (Family, &Verdict)> {
        self.findings.iter().map(|(family, verdict)| (*family, verdict))
    }

    /// Returns the state of `family`.
    pub fn verdict(&self, family: Family) -> &Verdict {
        self.findings
            .iter()
            .find(|(found, _)| *found == family)
            .map_or(&Verdict::Unchecked, |(_, verdict)| verdict)
    }

    /// Returns the families that a check found wrong.
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
