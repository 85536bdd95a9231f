//! Ranks that are processes of an MPI.

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

/// What a message is sent in: MPI counts in 32 bits with a sign.
const PIECE: usize = 1 << 30;

/// Messages of an MPI communicator, which is a duplicate: nothing that the application sends meets
/// them.
pub struct MpiWire {
    /// Never freed: ranks end at different times, and a message that comes too late must not meet a
    /// new communicator of the same number.
    comm: ManuallyDrop<SimpleCommunicator>,
    rank: usize,
    ranks: usize,
    under_way: Vec<Message>,
}

// SAFETY: `new` has seen that every thread may call MPI, at any time.
unsafe impl Send for MpiWire {}

/// A message in pieces, and the memory that they are in. The memory of a `Vec` stays where it is
/// when the `Vec` is moved.
struct Message {
    id: u64,
    bytes: Vec<u8>,
    requests: Vec<ffi::MPI_Request>,
    receives: bool,
}

/// In the order of what MPI's four levels allow.
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
    /// For the ranks of `world`. All of them must call it. Each takes a communicator for as long as
    /// the process lives.
    ///
    /// # Errors
    /// [`Error::Threads`], on all ranks, if one of them has less than `MPI_THREAD_MULTIPLE`: a thread of each serves the messages while the
    /// application goes on.
    pub fn new(world: &impl Communicator) -> Result<Self, Error> {
        let ranks = world.size() as usize;
        let mut levels = vec![0u8; ranks];
        world.all_gather_into(&level(threading_support()), &mut levels[..]);
        if let Some(rank) = levels.iter().position(|level| *level < 3) {
            let got = LEVELS.get(usize::from(levels[rank])).copied().unwrap_or("none");
            return Err(Error::Threads { rank, got: got.into() });
        }
        let comm = ManuallyDrop::new(world.duplicate());
        // SAFETY: the communicator is this one's own, and so is what it does on errors; the handler
        // is MPI's constant.
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
    // SAFETY: the buffer has the length that MPI asks for.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    text.truncate(usize::try_from(len).unwrap_or(0));
    Err(String::from_utf8_lossy(&text).into_owned())
}

impl MpiWire {
    fn begin(&mut self, mut message: Message, peer: usize, tag: u8) -> Result<(), String> {
        let (peer, tag, comm) = (peer as c_int, c_int::from(tag), self.comm.as_raw());
        let Message { bytes, requests, receives, .. } = &mut message;
        // One piece at least: an empty message is one too.
        let pieces = bytes.len().div_ceil(PIECE).max(1);
        let len = bytes.len();
        let mut outcome = Ok(());
        for piece in 0..pieces {
            let at = piece * PIECE;
            let count = (len - at).min(PIECE) as c_int;
            let mut request = std::mem::MaybeUninit::uninit();
            // SAFETY: `at + count` is at most the length of the `Vec`, which is neither read,
            // written nor freed before the request has
            // ended: it lies in `under_way` until then, and `close` ends or leaks what is left.
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
            // SAFETY: a call that succeeds has written it.
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
                // SAFETY: the request is one of MPI's that has not ended, and MPI writes the status
                // where it has.
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
                    // SAFETY: a receive that nobody will answer; once cancelled it ends, so waiting
                    // does not hang.
                    unsafe {
                        ffi::MPI_Cancel(&mut request);
                        ffi::MPI_Wait(&mut request, ffi::RSMPI_STATUS_IGNORE);
                    }
                } else {
                    // The other rank may be dead: MPI may read it for ever.
                    ended = false;
                }
            }
            if !ended {
                std::mem::forget(message.bytes);
            }
        }
    }
}

/// Ends the process and all others of the MPI with an error, in a second, in which the others find
/// out themselves. For an error after which `MPI_Finalize` would wait for a rank that is no more.
pub fn give_up(world: &impl Communicator, error: &dyn std::fmt::Display) -> ! {
    // In one piece: other ranks write to the same place.
    let line = format!("rank {} of {}: {error}\n", world.rank(), world.size());
    let _ = std::io::stderr().write_all(line.as_bytes());
    std::thread::sleep(std::time::Duration::from_secs(1));
    world.abort(1)
}
