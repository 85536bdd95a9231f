//! Values of metadata.

use super::reader::Reader;

/// The greatest depth of nested arrays.
const DEEPEST: usize = 8;

/// A value of a file's metadata.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "named for their types")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Array),
}

/// Values of one type.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "named for their types")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
}

impl Array {
    /// The number of values.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::F64(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
        }
    }

    /// True if the array has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn read(reader: &mut Reader, key: &str, depth: usize) -> Result<Self, String> {
        if depth == DEEPEST {
            return Err(format!("`{key}` has arrays nested more than {DEEPEST} deep"));
        }
        let kind = reader.u32(key)?;
        // The smallest size of a value. A string has at least its length, an array its type and
        // length.
        let smallest = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            _ => return Err(unknown(key, kind)),
        };
        let n = reader.count(key, smallest)?;
        Ok(match kind {
            0 => Array::U8(reader.values(n, key, u8::from_le_bytes)?),
            1 => Array::I8(reader.values(n, key, i8::from_le_bytes)?),
            2 => Array::U16(reader.values(n, key, u16::from_le_bytes)?),
            3 => Array::I16(reader.values(n, key, i16::from_le_bytes)?),
            4 => Array::U32(reader.values(n, key, u32::from_le_bytes)?),
            5 => Array::I32(reader.values(n, key, i32::from_le_bytes)?),
            6 => Array::F32(reader.values(n, key, f32::from_le_bytes)?),
            7 => {
                let bytes = reader.values(n, key, u8::from_le_bytes)?;
                Array::Bool(bytes.into_iter().map(|byte| boolean(byte, key)).collect::<Result<_, _>>()?)
            }
            8 => Array::String((0..n).map(|_| reader.string(key)).collect::<Result<_, _>>()?),
            9 => Array::Array((0..n).map(|_| Array::read(reader, key, depth + 1)).collect::<Result<_, _>>()?),
            10 => Array::U64(reader.values(n, key, u64::from_le_bytes)?),
            11 => Array::I64(reader.values(n, key, i64::from_le_bytes)?),
            _ => Array::F64(reader.values(n, key, f64::from_le_bytes)?),
        })
    }
}

impl Value {
    pub(super) fn read(reader: &mut Reader, key: &str) -> Result<Self, String> {
        Ok(match reader.u32(key)? {
            0 => Value::U8(u8::from_le_bytes(reader.array(key)?)),
            1 => Value::I8(i8::from_le_bytes(reader.array(key)?)),
            2 => Value::U16(u16::from_le_bytes(reader.array(key)?)),
            3 => Value::I16(i16::from_le_bytes(reader.array(key)?)),
            4 => Value::U32(reader.u32(key)?),
            5 => Value::I32(i32::from_le_bytes(reader.array(key)?)),
            6 => Value::F32(f32::from_le_bytes(reader.array(key)?)),
            7 => Value::Bool(boolean(u8::from_le_bytes(reader.array(key)?), key)?),
            8 => Value::String(reader.string(key)?),
            9 => Value::Array(Array::read(reader, key, 0)?),
            10 => Value::U64(reader.u64(key)?),
            11 => Value::I64(i64::from_le_bytes(reader.array(key)?)),
            12 => Value::F64(f64::from_le_bytes(reader.array(key)?)),
            kind => return Err(unknown(key, kind)),
        })
    }

    /// A whole number of any width that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// A float of either width.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// A boolean.
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(v) = *self { Some(v) } else { None }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        if let Value::String(v) = self { Some(v) } else { None }
    }

    /// An array.
    pub fn as_array(&self) -> Option<&Array> {
        if let Value::Array(v) = self { Some(v) } else { None }
    }

    /// An array of strings.
    pub fn as_strings(&self) -> Option<&[String]> {
        if let Value::Array(Array::String(v)) = self { Some(v) } else { None }
    }

    /// The type's name in error messages.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) | Value::U16(_) | Value::U32(_) | Value::U64(_) => "an unsigned number",
            Value::I8(_) | Value::I16(_) | Value::I32(_) | Value::I64(_) => "a signed number",
            Value::F32(_) | Value::F64(_) => "a float",
            Value::Bool(_) => "a boolean",
            Value::String(_) => "a string",
            Value::Array(_) => "an array",
        }
    }
}

fn boolean(byte: u8, key: &str) -> Result<bool, String> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(format!("`{key}` has the boolean {other}, which is neither 0 nor 1")),
    }
}

fn unknown(key: &str, kind: u32) -> String {
    format!("`{key}` has the unknown type {kind}")
}
