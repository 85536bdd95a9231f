//! The tensors of one call. Each tensor is checked when the call names it. [`CallTensors::finish`]
//! then checks them against each other.

use super::dtype::Element;
use super::{
    Access, DType, Error, TensorView, check_aliasing, check_apart, expect_broadcast, expect_shape, same_dtype,
};
use crate::device::DeviceFacts;

/// The element types that a call accepts for a tensor: one type, or every type that stores an
/// [`Element`].
pub(crate) trait Accepted {
    fn check(self, tensor: &'static str, view: &TensorView) -> Result<(), Error>;
}

impl Accepted for DType {
    fn check(self, tensor: &'static str, view: &TensorView) -> Result<(), Error> {
        same_dtype(tensor, view, self)
    }
}

impl Accepted for Element {
    fn check(self, tensor: &'static str, view: &TensorView) -> Result<(), Error> {
        view.check_element(tensor, self)
    }
}

/// The tensors that a call reads and writes, with their names in error messages. A view may be an
/// `Option`: an absent tensor is skipped.
pub(crate) struct CallTensors<'a, 'd> {
    pub device: &'d DeviceFacts,
    read: Vec<(&'static str, TensorView<'a>)>,
    written: Vec<(&'static str, TensorView<'a>)>,
}

impl<'a, 'd> CallTensors<'a, 'd> {
    pub fn new(device: &'d DeviceFacts) -> Self {
        CallTensors { device, read: Vec::new(), written: Vec::new() }
    }

    /// Checks the element type, the memory and the shape of a tensor. If another function checks
    /// the shape, pass the shape of the view.
    pub fn add(
        &mut self,
        access: Access,
        tensor: &'static str,
        view: impl Into<Option<TensorView<'a>>>,
        accepted: impl Accepted,
        shape: [usize; 4],
    ) -> Result<(), Error> {
        let Some(view) = view.into() else { return Ok(()) };
        accepted.check(tensor, &view)?;
        view.check(tensor, access, self.device)?;
        expect_shape(tensor, view.shape(), shape)?;
        match access {
            Access::Read => self.read.push((tensor, view)),
            Access::Write => self.written.push((tensor, view)),
        }
        Ok(())
    }

    /// A tensor that the call reads.
    pub fn read(
        &mut self,
        tensor: &'static str,
        view: impl Into<Option<TensorView<'a>>>,
        accepted: impl Accepted,
        shape: [usize; 4],
    ) -> Result<(), Error> {
        self.add(Access::Read, tensor, view, accepted, shape)
    }

    /// A tensor that the call reads. Axes of one element are repeated.
    pub fn read_broadcast(
        &mut self,
        tensor: &'static str,
        view: impl Into<Option<TensorView<'a>>>,
        accepted: impl Accepted,
        to: [usize; 4],
    ) -> Result<(), Error> {
        let Some(view) = view.into() else { return Ok(()) };
        self.read(tensor, view, accepted, view.shape())?;
        expect_broadcast(tensor, view.shape(), to)
    }

    /// A tensor that the call writes.
    pub fn write(
        &mut self,
        tensor: &'static str,
        view: impl Into<Option<TensorView<'a>>>,
        accepted: impl Accepted,
        shape: [usize; 4],
    ) -> Result<(), Error> {
        self.add(Access::Write, tensor, view, accepted, shape)
    }

    /// A gradient that the call writes, in F32 or in the type of its tensor.
    pub fn gradient(
        &mut self,
        tensor: &'static str,
        view: Option<TensorView<'a>>,
        dtype: DType,
        shape: [usize; 4],
    ) -> Result<(), Error> {
        let wide = view.is_some_and(|view| view.dtype() == DType::F32);
        self.write(tensor, view, if wide { DType::F32 } else { dtype }, shape)
    }

    /// Tensors that the call reads and that other functions check.
    pub fn read_checked(&mut self, tensors: impl IntoIterator<Item = (&'static str, TensorView<'a>)>) {
        self.read.extend(tensors);
    }

    /// Tensors that the call writes and that other functions check.
    pub fn write_checked(&mut self, tensors: impl IntoIterator<Item = (&'static str, TensorView<'a>)>) {
        self.written.extend(tensors);
    }

    /// The tensors that the call writes, in the order in which they were named.
    pub fn written(&self) -> &[(&'static str, TensorView<'a>)] {
        &self.written
    }

    /// Refuses a backward call that writes nothing.
    pub fn require_gradients(&self, why: &'static str) -> Result<(), Error> {
        match self.written.is_empty() {
            true => Err(Error::Unsupported { what: "the backward pass", why }),
            false => Ok(()),
        }
    }

    /// Refuses a written tensor that shares memory with another one.
    pub fn check_aliasing(&self) -> Result<(), Error> {
        check_aliasing(&self.written, &self.read, self.device)
    }

    /// Refuses memory that a written tensor shares, and bindings of written tensors that overlap.
    /// Use it if one dispatch writes all of these tensors.
    pub fn finish(&self) -> Result<(), Error> {
        self.check_aliasing()?;
        check_apart(&self.written, self.device)
    }
}
