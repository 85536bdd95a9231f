//! A case of another project's suite: inputs, attributes, expected outputs.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use wgpu_attention::reference::compare::{EPSILON_BF16, EPSILON_F16, EPSILON_F32, Tolerance, max_error};

use crate::rule::Rule;
use crate::tensor::Tensor;

pub struct Case {
    pub name: String,
    /// The package with the suite's implementation, and its version.
    pub package: String,
    pub operator: String,
    attributes: Value,
    pub inputs: BTreeMap<String, Tensor>,
    pub outputs: Vec<Output>,
}

/// An output that the suite expects.
pub struct Output {
    pub name: String,
    pub expected: Tensor,
    /// The result of the suite's own implementation in f64, if it has one.
    in_f64: Option<Vec<f64>>,
    rule: Rule,
}

/// The error of a result, as a share of two tolerances.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Errors {
    /// The suite's tolerance.
    pub of_suite: f64,
    /// This project's tolerance, from the output in f64: twice the error of the expected output,
    /// and a small floor.
    pub of_project: f64,
    /// The suite's tolerance, for the error of the expected output from the output in f64.
    pub of_expected: f64,
}

impl Errors {
    /// Takes the larger of each error.
    pub fn include(&mut self, other: Errors) {
        self.of_suite = self.of_suite.max(other.of_suite);
        self.of_project = self.of_project.max(other.of_project);
        self.of_expected = self.of_expected.max(other.of_expected);
    }
}

impl Case {
    pub fn read(path: &Path) -> Result<Self, String> {
        let bytes = std::fs::read(path).map_err(|e| e.to_string())?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|e| e.to_string())?;
        let (_, head) = SafeTensors::read_metadata(&bytes).map_err(|e| e.to_string())?;
        let meta = head.metadata().clone().unwrap_or_default();
        let text = |key: &str| meta.get(key).cloned().ok_or_else(|| format!("no {key}"));
        let json = |key: &str| serde_json::from_str::<Value>(&text(key)?).map_err(|e| e.to_string());
        let tensor = |name: &str| tensors.tensor(name).ok().map(|t| Tensor::read(&t)).transpose();
        let names = |value: Value| -> Vec<String> {
            value.as_array().into_iter().flatten().filter_map(|n| n.as_str().map(String::from)).collect()
        };
        let mut inputs = BTreeMap::new();
        for name in names(json("inputs")?) {
            if let Some(found) = tensor(&format!("in.{name}"))? {
                inputs.insert(name, found);
            }
        }
        let rules = json("rules")?;
        let mut outputs = Vec::new();
        for name in names(json("outputs")?) {
            let expected = tensor(&format!("out.{name}"))?.ok_or_else(|| format!("no output {name}"))?;
            let in_f64 = tensor(&format!("f64.{name}"))?.map(|t| t.data);
            let rule = rules.get(&name).and_then(Rule::read).ok_or_else(|| format!("no rule for {name}"))?;
            outputs.push(Output { name, expected, in_f64, rule });
        }
        Ok(Case {
            name: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            package: text("package")?,
            operator: text("operator")?,
            attributes: json("attributes")?,
            inputs,
            outputs,
        })
    }

    pub fn input(&self, name: &str) -> Result<&Tensor, String> {
        self.inputs.get(name).ok_or_else(|| format!("no input {name}"))
    }

    pub fn number(&self, attribute: &str) -> Option<f64> {
        self.attributes.get(attribute)?.as_f64()
    }

    pub fn integer(&self, attribute: &str) -> Option<i64> {
        self.attributes.get(attribute)?.as_i64()
    }

    pub fn text(&self, attribute: &str) -> Option<&str> {
        self.attributes.get(attribute)?.as_str()
    }

    /// Returns a number of things.
    pub fn count(&self, attribute: &str) -> Result<usize, String> {
        let count = self.integer(attribute).and_then(|n| usize::try_from(n).ok());
        count.ok_or_else(|| format!("no {attribute}"))
    }

    /// Returns numbers of things.
    pub fn list(&self, attribute: &str) -> Result<Vec<usize>, String> {
        let numbers = self.attributes.get(attribute).and_then(Value::as_array);
        let numbers = numbers.and_then(|list| list.iter().map(|n| Some(n.as_u64()? as usize)).collect());
        numbers.ok_or_else(|| format!("no {attribute}"))
    }

    /// Returns a number for each axis.
    pub fn axes<const N: usize>(&self, attribute: &str) -> Result<[usize; N], String> {
        self.list(attribute)?.try_into().map_err(|_| format!("{attribute} has other axes"))
    }

    /// Returns true if an attribute is there and true.
    pub fn flag(&self, attribute: &str) -> bool {
        self.attributes.get(attribute).and_then(Value::as_bool) == Some(true)
    }

    /// Returns a number in a function that is an attribute.
    pub fn constant(&self, function: &str) -> Option<f64> {
        self.attributes.get(function)?.get("constants")?.get(0)?.as_f64()
    }

    /// Returns the name of a function that is an attribute.
    pub fn function(&self, function: &str) -> Option<&str> {
        self.attributes.get(function)?.get("name")?.as_str()
    }

    pub fn output(&self, name: &str) -> Option<&Output> {
        self.outputs.iter().find(|output| output.name == name)
    }

    /// Judges a result by both tolerances.
    pub fn errors(&self, output: &Output, got: &[f64]) -> Errors {
        let expected = &output.expected.data;
        if got.len() != expected.len() {
            return Errors { of_suite: f64::INFINITY, of_project: f64::INFINITY, of_expected: 0.0 };
        }
        let truth = output.in_f64.as_ref().filter(|t| t.len() == expected.len()).unwrap_or(expected);
        let [of_suite, of_expected] = output.rule.errors(got, expected, truth);
        // Terms of gradients may cancel to zeros. Other outputs then tell how large the terms are.
        let of_all = || self.outputs.iter().map(|o| largest(&o.expected.data)).fold(0.0, f64::max);
        let largest = Some(largest(truth)).filter(|most| *most > 0.0).unwrap_or_else(of_all);
        let epsilon = match output.expected.dtype {
            Dtype::F16 => EPSILON_F16,
            Dtype::BF16 => EPSILON_BF16,
            _ => EPSILON_F32,
        };
        let tolerance = Tolerance::from_naive(expected, truth, largest.max(f64::MIN_POSITIVE), epsilon);
        Errors { of_suite, of_project: max_error(got, truth) / tolerance.absolute, of_expected }
    }
}

/// Returns the largest finite absolute value.
fn largest(data: &[f64]) -> f64 {
    data.iter().filter(|x| x.is_finite()).fold(0.0, |most, x| most.max(x.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(dtype: Dtype, expected: Vec<f64>, in_f64: Vec<f64>) -> Case {
        let expected = Tensor { dtype, shape: vec![expected.len()], data: expected };
        Case {
            name: "a case".into(),
            package: String::new(),
            operator: String::new(),
            attributes: Value::Null,
            inputs: BTreeMap::new(),
            outputs: vec![Output {
                name: "y".into(),
                expected,
                in_f64: Some(in_f64),
                rule: Rule::Each { rtol: 1e-3, atol: 1e-7 },
            }],
        }
    }

    fn errors(case: &Case, got: &[f64]) -> Errors {
        case.errors(&case.outputs[0], got)
    }

    #[test]
    fn both_tolerances_judge() {
        let exact = case(Dtype::F32, vec![1.0, -2.0], vec![1.0, -2.0]);
        assert_eq!(errors(&exact, &[1.0, -2.0]), Errors::default());
        // 2e-3 of 1 is twice ONNX's tolerance, and far above the floor of an exact output.
        let wrong = errors(&exact, &[1.002, -2.0]);
        assert!((1.9..2.0).contains(&wrong.of_suite) && wrong.of_project > 1000.0, "{wrong:?}");
        // An expected output with an error permits twice as much.
        let rounded = case(Dtype::BF16, vec![1.0, 0.992], vec![1.0, 1.0]);
        let right = errors(&rounded, &[1.0, 1.0]);
        assert!(right.of_suite > 8.0 && right.of_project == 0.0, "{right:?}");
        assert!(right.of_expected > 7.0 && right.of_expected < 9.0, "{right:?}");
    }

    #[test]
    fn zeros_use_other_outputs() {
        let mut zeros = case(Dtype::F32, vec![0.0], vec![0.0]);
        assert!(errors(&zeros, &[1e-7]).of_project > 1e6);
        zeros.outputs.extend(case(Dtype::F32, vec![1.0], vec![1.0]).outputs);
        assert!(errors(&zeros, &[1e-7]).of_project < 1.0);
        assert!(errors(&zeros, &[1e-5]).of_project > 1.0);
    }

    #[test]
    fn nan_infinity_and_length_fail() {
        let case = case(Dtype::F32, vec![1.0, f64::NEG_INFINITY], vec![1.0, f64::NEG_INFINITY]);
        assert_eq!(errors(&case, &[1.0, f64::NEG_INFINITY]), Errors::default());
        for got in [vec![f64::NAN, f64::NEG_INFINITY], vec![1.0, 0.0], vec![1.0]] {
            let found = errors(&case, &got);
            assert!(found.of_suite > 1e6 && found.of_project > 1e6, "{found:?}");
        }
    }
}
