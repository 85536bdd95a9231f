//! A wire between ranks that are MPI processes.

use std::io::Write as _;
use std::mem::ManuallyDrop;
use std::os::raw::c_int;

use mpi::environment::{Threading, threading_support};
use mpi::ffi;
use mpi::raw::AsRaw;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives};

use super::{Done, Wire};
use crate::error::Error;

/// The largest segment of a message: MPI counts bytes as signed 32-bit integers.
const PIECE: usize = 1 << 30;

/// A wire over MPI. It uses a duplicate of the communicator, so its messages never mix with the
/// application's.
pub struct MpiWire {
    /// Never freed, because ranks end at different times. A late message must not reach a new
    /// communicator with the same number.
    comm: ManuallyDrop<SimpleCommunicator>,
    rank: usize,
    ranks: usize,
    under_way: Vec<Message>,
}

// SAFETY: `new` checks that any thread may call MPI at any time.
unsafe impl Send for MpiWire {}

/// A message in segments, and the segments' memory. Moving a `Vec` does not move its memory.
struct Message {
    id: u64,
    bytes: Vec<u8>,
    requests: Vec<ffi::MPI_Request>,
    receives: bool,
}

/// MPI's four levels of thread support, in ascending order.
const LEVELS: [&str; 4] =
    ["MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE"];

fn level(threading: Threading) -> u8 {
    match threading {
        Threading::Single => 0,
        Threading::Funneled => 1,
        Threading::Serialized => 2,
        Threading::Multiple => 3,
    }
}

impl MpiWire {
    /// Creates a wire between the ranks of `world`. All ranks must call it. Each call uses up a
    /// communicator until the process ends.
    ///
    /// # Errors
    /// [`Error::Threads`], on all ranks, if a rank has less than `MPI_THREAD_MULTIPLE`. A separate
    /// thread serves the messages while the application continues.
    pub fn new(world: &impl Communicator) -> Result<Self, Error> {
        let ranks = world.size() as usize;
        let mut levels = vec![0u8; ranks];
        world.all_gather_into(&level(threading_support()), &mut levels[..]);
        if let Some(rank) = levels.iter().position(|level| *level < 3) {
            let got = LEVELS.get(usize::from(levels[rank])).copied().unwrap_or("none");
            return Err(Error::Threads { rank, got: got.into() });
        }
        let comm = ManuallyDrop::new(world.duplicate());
        // SAFETY: only this wire uses the communicator and its error handler. The handler is MPI's
        // constant.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(comm.as_raw(), ffi::RSMPI_ERRORS_RETURN) };
        let rank = world.rank() as usize;
        checked(code).map_err(|reason| Error::Transport { rank, reason })?;
        Ok(MpiWire { comm, rank, ranks, under_way: Vec::new() })
    }
}

fn checked(code: c_int) -> Result<(), String> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: the buffer has the length that MPI requires.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    text.truncate(usize::try_from(len).unwrap_or(0));
    Err(String::from_utf8_lossy(&text).into_owned())
}

impl MpiWire {
    fn begin(&mut self, mut message: Message, peer: usize, tag: u8) -> Result<(), String> {
        let (peer, tag, comm) = (peer as c_int, c_int::from(tag), self.comm.as_raw());
        let Message { bytes, requests, receives, .. } = &mut message;
        // Send at least one segment, also for an empty message.
        let pieces = bytes.len().div_ceil(PIECE).max(1);
        let len = bytes.len();
        let mut outcome = Ok(());
        for piece in 0..pieces {
            let at = piece * PIECE;
            let count = (len - at).min(PIECE) as c_int;
            let mut request = std::mem::MaybeUninit::uninit();
            // SAFETY: `at + count` is at most the length of the `Vec`. Nothing reads, writes or
            // frees the `Vec` before the request has ended: `under_way` holds it until then.
            // `close` ends the remaining requests or leaks their memory.
            let code = unsafe {
                let start = bytes.as_mut_ptr().add(at);
                if *receives {
                    ffi::MPI_Irecv(
                        start.cast(),
                        count,
                        ffi::RSMPI_UINT8_T,
                        peer,
                        tag,
                        comm,
                        request.as_mut_ptr(),
                    )
                } else {
                    ffi::MPI_Isend(
                        start.cast(),
                        count,
                        ffi::RSMPI_UINT8_T,
                        peer,
                        tag,
                        comm,
                        request.as_mut_ptr(),
                    )
                }
            };
            outcome = checked(code);
            if outcome.is_err() {
                break;
            }
            // SAFETY: a successful call has written the request.
            requests.push(unsafe { request.assume_init() });
        }
        self.under_way.push(message);
        outcome
    }
}

impl Wire for MpiWire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn send(&mut self, id: u64, to: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String> {
        self.begin(Message { id, bytes, requests: Vec::new(), receives: false }, to, tag)
    }

    fn receive(&mut self, id: u64, from: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String> {
        self.begin(Message { id, bytes, requests: Vec::new(), receives: true }, from, tag)
    }

    fn progress(&mut self, done: &mut Vec<Done>) -> Result<(), String> {
        let mut at = 0;
        while let Some(message) = self.under_way.get_mut(at) {
            while let Some(request) = message.requests.last_mut() {
                let (mut flag, mut status) = (0, std::mem::MaybeUninit::uninit());
                // SAFETY: the request is an MPI request that has not ended. MPI writes the status
                // when the request ends.
                checked(unsafe { ffi::MPI_Test(request, &mut flag, status.as_mut_ptr()) })?;
                if flag == 0 {
                    break;
                }
                let pieces = message.requests.len();
                if message.receives {
                    let mut count = 0;
                    // SAFETY: the request has ended, so MPI has written its status.
                    let code = unsafe {
                        ffi::MPI_Get_count(status.assume_init_ref(), ffi::RSMPI_UINT8_T, &mut count)
                    };
                    checked(code)?;
                    let expected = (message.bytes.len() - (pieces - 1) * PIECE).min(PIECE);
                    if count as usize != expected {
                        return Err(format!("got a message of {count} bytes, expected {expected}"));
                    }
                }
                message.requests.pop();
            }
            if message.requests.is_empty() {
                let Message { id, bytes, .. } = self.under_way.remove(at);
                done.push(Done { id, bytes });
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        for mut message in self.under_way.drain(..) {
            let mut ended = true;
            for mut request in message.requests.drain(..) {
                if message.receives {
                    // SAFETY: the request is a receive without a sender. A cancelled receive ends,
                    // so the wait does not hang.
                    unsafe {
                        ffi::MPI_Cancel(&mut request);
                        ffi::MPI_Wait(&mut request, ffi::RSMPI_STATUS_IGNORE);
                    }
                } else {
                    // The other rank may be dead, so MPI may read the memory for ever.
                    ended = false;
                }
            }
            if !ended {
                std::mem::forget(message.bytes);
            }
        }
    }
}

/// Prints an error and aborts all MPI processes after one second. In that second, the other ranks
/// can report the error themselves. Use it after an error with which `MPI_Finalize` would wait for
/// a dead rank.
pub fn give_up(world: &impl Communicator, error: &dyn std::fmt::Display) -> ! {
    // Write the whole line at once, because other ranks write to the same stream.
    let line = format!("rank {} of {}: {error}\n", world.rank(), world.size());
    let _ = std::io::stderr().write_all(line.as_bytes());
    std::thread::sleep(std::time::Duration::from_secs(1));
    world.abort(1)
}
