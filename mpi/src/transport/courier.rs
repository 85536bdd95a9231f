//! A thread that serves the wire while the device computes. It moves messages, sends signs of life
//! to the other ranks, and detects ranks that are lost.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{Done, Tag, Wire};
use crate::error::Error;

/// The longest time between two signs of life.
const BEAT: Duration = Duration::from_millis(200);
/// The time between two checks of messages in flight.
const PAUSE: Duration = Duration::from_micros(100);
/// The time that earlier messages may still take after a rank's farewell.
const GRACE: Duration = Duration::from_secs(1);
const CONTROL_BYTES: usize = 256;

const ALIVE: u8 = 1;
const GAVE_UP: u8 = 2;
const FAREWELL: u8 = 3;

enum Command {
    Send {
        to: usize,
        tag: Tag,
        bytes: Vec<u8>,
    },
    Receive {
        number: u64,
        from: usize,
        tag: Tag,
        bytes: Vec<u8>,
    },
    /// Tells the other ranks the reason.
    GiveUp(String),
    End,
}

enum Event {
    Received {
        number: u64,
        from: usize,
        tag: Tag,
        bytes: Vec<u8>,
    },
    /// The memory of a sent message, free for reuse.
    Free(Vec<u8>),
    Failed(Error),
}

/// Bytes and messages that a rank has sent, without signs of life.
#[derive(Debug, Default)]
struct Counters {
    bytes: AtomicU64,
    messages: AtomicU64,
}

/// The number of an expected message, and its bytes when it has arrived.
type Expected = (u64, Option<Vec<u8>>);

/// The caller's handle to the courier's thread.
pub(crate) struct Courier {
    rank: usize,
    ranks: usize,
    commands: Sender<Command>,
    events: Receiver<Event>,
    /// Expected messages, in order. They may arrive in a different order.
    expected: HashMap<(usize, Tag), VecDeque<Expected>>,
    numbers: u64,
    pool: Vec<Vec<u8>>,
    failure: Option<Error>,
    counters: Counters,
    thread: Option<JoinHandle<()>>,
}

impl Courier {
    pub fn new(wire: impl Wire, patience: Duration) -> Self {
        let (commands, from_caller) = channel();
        let (to_caller, events) = channel();
        let (rank, ranks) = (wire.rank(), wire.ranks());
        let thread = thread::spawn(move || Rounds::new(wire, patience, to_caller).run(&from_caller));
        Courier {
            rank,
            ranks,
            commands,
            events,
            expected: HashMap::new(),
            numbers: 0,
            pool: Vec::new(),
            failure: None,
            counters: Counters::default(),
            thread: Some(thread),
        }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The number of bytes and messages sent so far.
    pub fn sent(&self) -> [u64; 2] {
        [&self.counters.bytes, &self.counters.messages].map(|count| count.load(Ordering::Relaxed))
    }

    /// Returns memory for a message of `len` bytes, and reuses the memory of an earlier message if
    /// possible.
    pub fn memory(&mut self, len: usize) -> Vec<u8> {
        while let Ok(event) = self.events.try_recv() {
            self.take(event);
        }
        // Take the memory whose capacity is closest to `len`.
        let best = self.pool.iter().enumerate().min_by_key(|(_, bytes)| bytes.capacity().abs_diff(len));
        let mut bytes = match best.map(|(at, _)| at) {
            Some(at) => self.pool.swap_remove(at),
            None => Vec::new(),
        };
        bytes.resize(len, 0);
        bytes
    }

    /// Returns memory to the pool.
    pub fn recycle(&mut self, bytes: Vec<u8>) {
        self.pool.push(bytes);
    }

    pub fn send(&self, to: usize, tag: Tag, bytes: Vec<u8>) {
        self.counters.bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.counters.messages.fetch_add(1, Ordering::Relaxed);
        // If the thread has ended, it has already reported its error.
        let _ = self.commands.send(Command::Send { to, tag, bytes });
    }

    /// Prepares to receive a message of `len` bytes.
    pub fn expect(&mut self, from: usize, tag: Tag, len: usize) {
        let bytes = self.memory(len);
        self.numbers += 1;
        let number = self.numbers;
        self.expected.entry((from, tag)).or_default().push_back((number, None));
        let _ = self.commands.send(Command::Receive { number, from, tag, bytes });
    }

    /// Waits for the next expected message, and calls `idle` repeatedly while it waits.
    pub fn wait(&mut self, from: usize, tag: Tag, mut idle: impl FnMut()) -> Result<Vec<u8>, Error> {
        loop {
            if let Some(expected) = self.expected.get_mut(&(from, tag))
                && let Some((_, Some(_))) = expected.front()
                && let Some((_, Some(bytes))) = expected.pop_front()
            {
                return Ok(bytes);
            }
            if let Some(failure) = &self.failure {
                return Err(failure.clone());
            }
            match self.events.recv_timeout(2 * PAUSE) {
                Ok(event) => self.take(event),
                Err(RecvTimeoutError::Timeout) => idle(),
                Err(RecvTimeoutError::Disconnected) => {
                    let reason = "its message thread has ended".into();
                    self.failure.get_or_insert(Error::Transport { rank: self.rank, reason });
                }
            }
        }
    }

    /// Tells the other ranks that this rank cannot continue.
    pub fn give_up(&mut self, error: &Error) {
        if self.failure.is_none() {
            self.failure = Some(error.clone());
            let _ = self.commands.send(Command::GiveUp(error.to_string()));
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Received { number, from, tag, bytes } => {
                let expected = self.expected.entry((from, tag)).or_default();
                if let Some((_, place)) = expected.iter_mut().find(|(of, _)| *of == number) {
                    *place = Some(bytes);
                }
            }
            Event::Free(bytes) => self.pool.push(bytes),
            Event::Failed(error) => {
                self.failure.get_or_insert(error);
            }
        }
    }
}

impl Drop for Courier {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The purpose of a message in flight.
enum Purpose {
    Sent,
    Received { number: u64, from: usize, tag: Tag },
    ControlSent,
    Control { from: usize },
}

/// The last known state of another rank.
struct Peer {
    heard: Instant,
    farewell: Option<Instant>,
    /// The number of messages that this rank still expects from it.
    waited: usize,
}

/// The state of the courier's thread.
struct Rounds<W> {
    wire: W,
    patience: Duration,
    events: Sender<Event>,
    peers: Vec<Peer>,
    purposes: HashMap<u64, Purpose>,
    next: u64,
    /// The number of sends that have not ended.
    sending: usize,
    beaten: Instant,
    control: Vec<Vec<u8>>,
    failed: bool,
}

impl<W: Wire> Rounds<W> {
    fn new(wire: W, patience: Duration, events: Sender<Event>) -> Self {
        let now = Instant::now();
        let peer = |_| Peer { heard: now, farewell: None, waited: 0 };
        let peers = (0..wire.ranks()).map(peer).collect();
        Rounds {
            wire,
            patience,
            events,
            peers,
            purposes: HashMap::new(),
            next: 0,
            sending: 0,
            beaten: now - BEAT,
            control: Vec::new(),
            failed: false,
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<W> {
        let own = self.wire.rank();
        (0..self.wire.ranks()).filter(move |rank| *rank != own)
    }

    fn run(mut self, commands: &Receiver<Command>) {
        for from in self.others() {
            self.listen(from);
        }
        let mut done = Vec::new();
        let mut ending = false;
        while !ending {
            let busy = self.purposes.len() > self.others().count();
            let command = if busy {
                commands.try_recv().map_err(|e| matches!(e, TryRecvError::Disconnected))
            } else {
                commands.recv_timeout(BEAT / 20).map_err(|e| matches!(e, RecvTimeoutError::Disconnected))
            };
            match command {
                Ok(Command::Send { to, tag, bytes }) => self.send(to, tag, bytes, Purpose::Sent),
                Ok(Command::Receive { number, from, tag, bytes }) => self.receive(number, from, tag, bytes),
                Ok(Command::GiveUp(reason)) => {
                    self.tell(GAVE_UP, &reason);
                    self.failed = true;
                }
                Ok(Command::End) | Err(true) => ending = true,
                Err(false) => {
                    self.round(&mut done);
                    if busy {
                        thread::sleep(PAUSE);
                    }
                }
            }
        }
        self.end(&mut done);
    }

    /// Ends the thread: waits until earlier messages are sent, then sends the farewell.
    fn end(&mut self, done: &mut Vec<Done>) {
        let end = Instant::now() + if self.failed { GRACE } else { self.patience };
        while self.sending > 0 && !self.failed && Instant::now() < end {
            self.round(done);
            thread::sleep(PAUSE);
        }
        self.tell(FAREWELL, "");
        let end = Instant::now() + GRACE;
        while self.purposes.values().any(|p| matches!(p, Purpose::ControlSent)) && Instant::now() < end {
            if self.wire.progress(done).is_err() {
                break;
            }
            for Done { id, .. } in done.drain(..) {
                self.purposes.remove(&id);
            }
            thread::sleep(PAUSE);
        }
        self.wire.close();
    }

    fn begin(&mut self, purpose: Purpose) -> u64 {
        self.next += 1;
        self.purposes.insert(self.next, purpose);
        self.next
    }

    fn send(&mut self, to: usize, tag: Tag, bytes: Vec<u8>, purpose: Purpose) {
        self.sending += usize::from(matches!(purpose, Purpose::Sent));
        let id = self.begin(purpose);
        if let Err(reason) = self.wire.send(id, to, tag as u8, bytes) {
            self.purposes.remove(&id);
            self.fail(Error::Transport { rank: to, reason });
        }
    }

    fn receive(&mut self, number: u64, from: usize, tag: Tag, bytes: Vec<u8>) {
        self.peers[from].waited += 1;
        let id = self.begin(Purpose::Received { number, from, tag });
        if let Err(reason) = self.wire.receive(id, from, tag as u8, bytes) {
            self.fail(Error::Transport { rank: from, reason });
        }
    }

    fn listen(&mut self, from: usize) {
        let mut bytes = self.control.pop().unwrap_or_default();
        bytes.resize(CONTROL_BYTES, 0);
        let id = self.begin(Purpose::Control { from });
        if let Err(reason) = self.wire.receive(id, from, Tag::Control as u8, bytes) {
            self.fail(Error::Transport { rank: from, reason });
        }
    }

    /// Sends a control message to every rank that has not said farewell.
    fn tell(&mut self, what: u8, text: &str) {
        for to in self.others() {
            if self.peers[to].farewell.is_some() {
                continue;
            }
            let mut bytes = self.control.pop().unwrap_or_default();
            bytes.clear();
            bytes.push(what);
            bytes.extend(text.bytes().take(CONTROL_BYTES - 1));
            bytes.resize(CONTROL_BYTES, 0);
            self.send(to, Tag::Control, bytes, Purpose::ControlSent);
        }
    }

    fn fail(&mut self, error: Error) {
        if !self.failed {
            self.failed = true;
            // Do not repeat a message that came from another rank.
            if !matches!(error, Error::GaveUp { .. }) {
                self.tell(GAVE_UP, &error.to_string());
            }
            let _ = self.events.send(Event::Failed(error));
        }
    }

    fn round(&mut self, done: &mut Vec<Done>) {
        if let Err(reason) = self.wire.progress(done) {
            let rank = self.wire.rank();
            self.fail(Error::Transport { rank, reason });
        }
        let now = Instant::now();
        for Done { id, bytes } in done.drain(..) {
            match self.purposes.remove(&id) {
                Some(Purpose::Sent) => {
                    self.sending -= 1;
                    let _ = self.events.send(Event::Free(bytes));
                }
                Some(Purpose::Received { number, from, tag }) => {
                    let peer = &mut self.peers[from];
                    peer.heard = now;
                    peer.waited -= 1;
                    let _ = self.events.send(Event::Received { number, from, tag, bytes });
                }
                Some(Purpose::ControlSent) => self.control.push(bytes),
                Some(Purpose::Control { from }) => self.heard(from, bytes, now),
                None => (),
            }
        }
        if now.duration_since(self.beaten) >= BEAT {
            // If this thread was not scheduled for a long time, it read no signs of life: restart
            // the wait.
            if now.duration_since(self.beaten) > self.patience / 2 {
                self.peers.iter_mut().for_each(|peer| peer.heard = now);
            }
            self.beaten = now;
            self.tell(ALIVE, "");
        }
        self.look_for_the_dead(now);
    }

    fn heard(&mut self, from: usize, bytes: Vec<u8>, now: Instant) {
        self.peers[from].heard = now;
        let text = bytes[1..].split(|byte| *byte == 0).next().unwrap_or_default();
        let reason = String::from_utf8_lossy(text).into_owned();
        match bytes[0] {
            GAVE_UP => self.fail(Error::GaveUp { rank: from, reason }),
            FAREWELL => self.peers[from].farewell = Some(now),
            _ => (),
        }
        self.control.push(bytes);
        if self.peers[from].farewell.is_none() {
            self.listen(from);
        }
    }

    fn look_for_the_dead(&mut self, now: Instant) {
        for rank in self.others() {
            let Peer { heard, farewell, waited } = self.peers[rank];
            let silent = now.duration_since(heard);
            match farewell {
                None if silent > self.patience => {
                    self.fail(Error::Lost { rank, seconds: silent.as_secs_f32() });
                }
                Some(at) if waited > 0 && now.duration_since(at) > GRACE => {
                    self.fail(Error::Left { rank });
                }
                _ => (),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ThreadWire;
    use super::*;

    fn pair(patience: Duration) -> [Courier; 2] {
        let mut wires = ThreadWire::all(2).into_iter().map(|wire| Courier::new(wire, patience));
        std::array::from_fn(|_| wires.next().unwrap())
    }

    #[test]
    fn messages_of_a_tag_keep_their_order_and_their_memory_is_used_again() {
        let [mut a, mut b] = pair(Duration::from_secs(5));
        for round in 0..3u8 {
            for n in 0..4u8 {
                let mut bytes = a.memory(1000);
                bytes.fill(round * 4 + n);
                a.send(1, Tag::Keys, bytes);
                b.expect(0, Tag::Keys, 1000);
            }
            a.send(1, Tag::Header, vec![99; 10]);
            b.expect(0, Tag::Header, 10);
            assert_eq!(b.wait(0, Tag::Header, || ()).unwrap(), [99; 10]);
            for n in 0..4u8 {
                let bytes = b.wait(0, Tag::Keys, || ()).unwrap();
                assert_eq!(bytes, [round * 4 + n; 1000]);
                b.recycle(bytes);
            }
        }
        assert_eq!(a.sent(), [12030, 15]);
    }

    /// A wire whose messages end in the reverse order.
    struct Reversed(ThreadWire);

    impl Wire for Reversed {
        fn rank(&self) -> usize {
            self.0.rank()
        }
        fn ranks(&self) -> usize {
            self.0.ranks()
        }
        fn send(&mut self, id: u64, to: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String> {
            self.0.send(id, to, tag, bytes)
        }
        fn receive(&mut self, id: u64, from: usize, tag: u8, bytes: Vec<u8>) -> Result<(), String> {
            self.0.receive(id, from, tag, bytes)
        }
        fn progress(&mut self, done: &mut Vec<Done>) -> Result<(), String> {
            let before = done.len();
            self.0.progress(done)?;
            done[before..].reverse();
            Ok(())
        }
        fn close(&mut self) {
            self.0.close();
        }
    }

    #[test]
    fn messages_that_end_out_of_order_are_taken_in_order() {
        let mut wires = ThreadWire::all(2).into_iter();
        let a = Courier::new(wires.next().unwrap(), Duration::from_secs(20));
        (0..5u8).for_each(|n| a.send(1, Tag::Keys, vec![n; 8]));
        // All messages arrive before the receiver starts.
        thread::sleep(Duration::from_millis(300));
        let mut b = Courier::new(Reversed(wires.next().unwrap()), Duration::from_secs(20));
        (0..5).for_each(|_| b.expect(0, Tag::Keys, 8));
        for n in 0..5u8 {
            assert_eq!(b.wait(0, Tag::Keys, || ()).unwrap(), [n; 8]);
        }
    }

    #[test]
    fn whoever_ends_in_order_is_not_lost_but_cannot_be_waited_for() {
        let [mut a, b] = pair(Duration::from_secs(20));
        b.send(0, Tag::Keys, vec![7; 3]);
        drop(b);
        a.expect(1, Tag::Keys, 3);
        assert_eq!(a.wait(1, Tag::Keys, || ()).unwrap(), [7; 3]);
        let start = Instant::now();
        a.expect(1, Tag::Keys, 3);
        assert_eq!(a.wait(1, Tag::Keys, || ()), Err(Error::Left { rank: 1 }));
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn whoever_gives_up_tells_why() {
        let [mut a, mut b] = pair(Duration::from_secs(20));
        a.expect(1, Tag::Keys, 3);
        b.give_up(&Error::Device("the device is lost".into()));
        let failed = Error::GaveUp { rank: 1, reason: "the device is lost".into() };
        assert_eq!(a.wait(1, Tag::Keys, || ()), Err(failed.clone()));
        // Later calls return the same error.
        assert_eq!(a.wait(1, Tag::Header, || ()), Err(failed));
    }

    #[test]
    fn a_message_of_another_length_is_an_error() {
        let [mut a, b] = pair(Duration::from_secs(20));
        b.send(0, Tag::Keys, vec![7; 4]);
        a.expect(1, Tag::Keys, 3);
        let error = a.wait(1, Tag::Keys, || ()).unwrap_err().to_string();
        assert!(error.contains("4 bytes, expected 3"), "{error}");
    }
}
