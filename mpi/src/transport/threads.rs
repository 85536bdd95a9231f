//! A wire between ranks that are threads of one process.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};

use super::{Done, Wire};

struct Message {
    from: usize,
    tag: u8,
    bytes: Vec<u8>,
}

/// A wire over channels between threads. Use it for tests, and for several devices in one process.
/// Each message is copied.
pub struct ThreadWire {
    rank: usize,
    to: Vec<Sender<Message>>,
    inbox: Receiver<Message>,
    sent: Vec<Done>,
    arrived: HashMap<(usize, u8), VecDeque<Vec<u8>>>,
    wanted: HashMap<(usize, u8), VecDeque<Done>>,
}

impl ThreadWire {
    /// Creates connected wires for `ranks` ranks.
    pub fn all(ranks: usize) -> Vec<Self> {
        let (to, inboxes): (Vec<_>, Vec<_>) = (0..ranks).map(|_| channel()).unzip();
        let end = |(rank, inbox)| ThreadWire {
            rank,
            to: to.clone(),
            inbox,
            sent: Vec::new(),
            arrived: HashMap::new(),
            wanted: HashMap::new(),
        };
        inboxes.into_iter().enumerate().map(end).collect()
    }
}

impl Wire for ThreadWire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.to.len()
    }

    fn send(&mut self, id: u64, to: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String> {
        // A message to a rank that has ended is lost, as with MPI.
        let _ = self.to[to].send(Message { from: self.rank, tag, bytes: bytes.clone() });
        self.sent.push(Done { id, bytes });
        Ok(())
    }

    fn receive(&mut self, id: u64, from: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String> {
        self.wanted.entry((from, tag)).or_default().push_back(Done { id, bytes });
        Ok(())
    }

    fn progress(&mut self, done: &mut Vec<Done>) -> Result<(), String> {
        done.append(&mut self.sent);
        while let Ok(Message { from, tag, bytes }) = self.inbox.try_recv() {
            self.arrived.entry((from, tag)).or_default().push_back(bytes);
        }
        for (key, wanted) in &mut self.wanted {
            let Some(arrived) = self.arrived.get_mut(key) else { continue };
            while let (Some(Done { bytes, .. }), Some(came)) = (wanted.front_mut(), arrived.front()) {
                if bytes.len() != came.len() {
                    let (got, expected) = (came.len(), bytes.len());
                    return Err(format!("got a message of {got} bytes, expected {expected}"));
                }
                bytes.copy_from_slice(came);
                arrived.pop_front();
                done.extend(wanted.pop_front());
            }
        }
        Ok(())
    }

    fn close(&mut self) {
        self.wanted.clear();
    }
}
