//! The tolerance of a suite.

use serde_json::Value;
use wgpu_attention::reference::compare::max_error;

/// A suite's own test of a result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Each element: |got − expected| ≤ atol + rtol · |expected|.
    Each { rtol: f64, atol: f64 },
    /// All elements: Σ (got − expected)² ≤ limit · Σ expected².
    Nmse(f64),
    /// All elements: √(Σ (got − truth)² / Σ truth²) ≤ limit.
    Rms(f64),
    /// The largest error, from the truth, is at most `factor` times the expected output's, plus
    /// `atol`.
    Times { factor: f64, atol: f64 },
}

impl Rule {
    /// Reads `{"each": [rtol, atol]}`, `{"nmse": limit}`, `{"rms": limit}` or
    /// `{"times": [factor, atol]}`.
    pub fn read(value: &Value) -> Option<Self> {
        let (name, numbers) = value.as_object()?.iter().next()?;
        let number = |n: usize| numbers.get(n).and_then(Value::as_f64);
        Some(match name.as_str() {
            "each" => Rule::Each { rtol: number(0)?, atol: number(1)? },
            "nmse" => Rule::Nmse(numbers.as_f64()?),
            "rms" => Rule::Rms(numbers.as_f64()?),
            "times" => Rule::Times { factor: number(0)?, atol: number(1)? },
            _ => return None,
        })
    }

    /// Returns the errors of the result and of the expected output, as shares of the tolerance.
    pub fn errors(&self, got: &[f64], expected: &[f64], truth: &[f64]) -> [f64; 2] {
        match *self {
            Rule::Each { rtol, atol } => {
                let share = |got: &[f64], want: &[f64]| {
                    largest(got, want, |want| (atol + rtol * want.abs()).min(f64::MAX))
                };
                [share(got, expected), share(expected, truth)]
            }
            Rule::Nmse(limit) => [squares(got, expected) / limit, squares(expected, truth) / limit],
            Rule::Rms(limit) => [squares(got, truth).sqrt() / limit, squares(expected, truth).sqrt() / limit],
            Rule::Times { factor, atol } => {
                let of_expected = max_error(expected, truth);
                let limit = factor * of_expected + atol;
                [max_error(got, truth) / limit, of_expected / limit]
            }
        }
    }
}

/// Returns the largest error, as a share of each element's tolerance. Infinities are equal, or the
/// error is infinite.
fn largest(got: &[f64], want: &[f64], tolerance: impl Fn(f64) -> f64) -> f64 {
    let share = |(got, want): (&f64, &f64)| max_error(&[*got], &[*want]) / tolerance(*want);
    got.iter().zip(want).map(share).fold(0.0, f64::max)
}

/// Returns Σ (got − want)² / Σ want².
fn squares(got: &[f64], want: &[f64]) -> f64 {
    let error = |(got, want): (&f64, &f64)| max_error(&[*got], &[*want]).powi(2);
    let errors: f64 = got.iter().zip(want).map(error).sum();
    let finite = want.iter().filter(|x| x.is_finite());
    errors / finite.map(|x| x * x).sum::<f64>().max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_judge_as_written() {
        let rule = |text: &str| Rule::read(&serde_json::from_str(text).expect("JSON")).expect("a rule");
        let (expected, truth) = ([1.0, 2.0], [1.0, 2.1]);
        let of = |rule: Rule| rule.errors(&[1.0, 2.3], &expected, &truth).map(|x| (x * 1e6).round() / 1e6);
        assert_eq!(of(rule(r#"{"each": [0.1, 0.1]}"#)), [1.0, 0.322581]);
        assert_eq!(of(rule(r#"{"nmse": 0.018}"#)), [1.0, 0.10269]);
        assert_eq!(of(rule(r#"{"rms": 0.1}"#)), [0.859867, 0.429934]);
        assert_eq!(of(rule(r#"{"times": [2, 0.05]}"#)), [0.8, 0.4]);
        assert_eq!(Rule::read(&Value::from(1)), None);
    }

    #[test]
    fn nan_and_infinity_fail() {
        let rules = [
            Rule::Each { rtol: 1.0, atol: 1.0 },
            Rule::Nmse(1.0),
            Rule::Rms(1.0),
            Rule::Times { factor: 2.0, atol: 1.0 },
        ];
        for rule in rules {
            let want = [1.0, f64::NEG_INFINITY];
            assert_eq!(rule.errors(&want, &want, &want), [0.0, 0.0], "{rule:?}");
            for got in [[f64::NAN, f64::NEG_INFINITY], [1.0, 0.0]] {
                assert!(rule.errors(&got, &want, &want)[0] > 1e6, "{rule:?}");
            }
        }
    }
}
