//! What the model remembers: the row, the workers' memories, a message under way.

use std::time::Duration;

use jobrequest::job::{HAND_BACK_LIMIT, Status};

/// Names one claim. 0 is none; a name may be used again when nothing in the state refers to it.
pub type ClaimId = u8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    pub status: Status,
    pub attempts: u8,
    pub max: u8,
    pub cancel_requested: bool,
    pub token: u8,
    /// The lease stands by the database's clock. False also where there is none.
    pub lease: bool,
    /// `run_at` has passed.
    pub due: bool,
    pub handed: Handed,
    /// The newest explicit retry's mark is written in the row.
    pub mark_used: bool,
    /// The resource's status shows this state.
    pub shown: bool,
    /// Only the checker knows: whose lease it is, and how many claims have been paid for.
    pub holder: ClaimId,
    pub paid: u8,
}

/// For how long the job has been handed back again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Handed {
    No,
    Recently,
    ForADay,
}

impl Handed {
    pub fn time(self) -> Duration {
        match self {
            Self::No => Duration::ZERO,
            Self::Recently => Duration::from_secs(3600),
            Self::ForADay => HAND_BACK_LIMIT,
        }
    }
}

/// What a worker remembers of its claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Claim {
    pub id: ClaimId,
    pub token: u8,
    pub attempts: u8,
    pub max: u8,
    pub handed: Handed,
    /// The lease stands by the worker's own clock.
    pub lease: bool,
    /// It has heard of the cancel.
    pub told: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Worker {
    Absent,
    Idle,
    /// Its claim took effect and the reply was lost: it knows the token it asked with.
    Asking {
        id: ClaimId,
        token: u8,
        lease: bool,
    },
    /// Has not started.
    Holding(Claim),
    /// The executor runs and can be stopped.
    Working(Claim),
    /// Past the point of no return.
    Committed(Claim),
    /// The executor was stopped before that point.
    Stopped(Claim),
    /// The attempt is over; the row may know (`done`) or not.
    Finishing {
        message: Message,
        done: bool,
    },
}

impl Worker {
    /// The claim under which it may bring about effects, if its own clock still allows that.
    pub fn acts_under(&self) -> Option<ClaimId> {
        match *self {
            Self::Absent | Self::Idle | Self::Stopped(_) | Self::Finishing { .. } => None,
            Self::Asking { id, lease, .. } => lease.then_some(id),
            Self::Holding(claim) | Self::Working(claim) | Self::Committed(claim) => claim.lease.then_some(claim.id),
        }
    }

    pub fn claim(mut self) -> Option<ClaimId> {
        self.ids().map(|(id, _)| *id)
    }

    fn forget_what_is_lost(&mut self, holder: ClaimId, current: u8) {
        match self {
            Self::Absent | Self::Idle | Self::Asking { .. } => {}
            Self::Holding(claim) | Self::Working(claim) | Self::Committed(claim) | Self::Stopped(claim) => {
                if claim.id != holder {
                    *claim = Claim { attempts: 0, max: 0, handed: Handed::No, told: false, ..*claim };
                }
            }
            Self::Finishing { message, done } => {
                if message.id != holder {
                    message.forget();
                }
                // Whether it took effect matters as long as an answer may say so.
                *done &= message.token == current;
            }
        }
    }

    fn ids(&mut self) -> Option<(&mut ClaimId, &mut u8)> {
        match self {
            Self::Absent | Self::Idle => None,
            Self::Asking { id, token, .. } => Some((id, token)),
            Self::Holding(claim) | Self::Working(claim) | Self::Committed(claim) | Self::Stopped(claim) => {
                Some((&mut claim.id, &mut claim.token))
            }
            Self::Finishing { message, .. } => Some((&mut message.id, &mut message.token)),
        }
    }
}

/// A finish on its way to the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    pub id: ClaimId,
    pub token: u8,
    pub end: End,
    /// The attempt had passed the point of no return.
    pub committed: bool,
}

impl Message {
    fn forget(&mut self) {
        *self = Self { end: End::Failed, committed: false, ..*self };
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum End {
    Succeeded,
    /// `finalize_cancelled`.
    Finalize,
    /// `mark_failed_or_retry`, as decided.
    Waits {
        status: Status,
        due: bool,
        free: bool,
    },
    Failed,
    Cancelled,
}

/// What a rescue has read, where it reads and writes apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Snapshot {
    pub attempts: u8,
    pub max: u8,
    pub cancel_requested: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct State {
    /// None when retention has removed it.
    pub row: Option<Row>,
    pub workers: [Worker; 3],
    /// A finish that outlived its sender's patience or life.
    pub late: Option<Message>,
    pub rescuer: Option<Snapshot>,
    pub retries_left: u8,
}

impl State {
    pub fn accepted(workers: usize, max: u8, retries_left: u8) -> Self {
        let row = Row {
            status: Status::Queued,
            attempts: 0,
            max,
            cancel_requested: false,
            token: 0,
            lease: false,
            due: false,
            handed: Handed::No,
            mark_used: true,
            shown: false,
            holder: 0,
            paid: 0,
        };
        let mut all = [Worker::Absent; 3];
        all[..workers].fill(Worker::Idle);
        Self { row: Some(row), workers: all, late: None, rescuer: None, retries_left }
    }

    /// A name that nothing refers to.
    pub fn fresh_id(&self) -> ClaimId {
        let mut copy = *self;
        let mut used = [false; 16];
        copy.each_id(|id, token| {
            used[usize::from(*id)] = true;
            used[usize::from(*token)] = true;
        });
        (1..).find(|id| !used[usize::from(*id)]).expect("five places refer to claims")
    }

    /// Two states that differ in the names of claims or in the order of the workers are one. Where tokens are not the
    /// claims' names, they stay as they are, and so does the order. So are two that differ in what the holders of lost
    /// claims remember and say: that they change anything is wrong, whatever it is.
    pub fn normal(mut self, tokens_name_claims: bool) -> Self {
        let (holder, token) = self.row.map_or((0, 0), |row| (row.holder, row.token));
        for worker in &mut self.workers {
            worker.forget_what_is_lost(holder, token);
        }
        if let Some(late) = self.late.as_mut().filter(|late| late.id != holder) {
            late.forget();
        }
        if tokens_name_claims {
            self.workers.sort_unstable();
        }
        let (mut names, mut next) = ([0_u8; 16], 1);
        let mut rename = |name: &mut u8| {
            if *name != 0 {
                let known = &mut names[usize::from(*name)];
                if *known == 0 {
                    *known = next;
                    next += 1;
                }
                *name = *known;
            }
        };
        self.each_id(|id, token| {
            rename(id);
            if tokens_name_claims {
                rename(token);
            }
        });
        if tokens_name_claims {
            self.workers.sort_unstable();
        }
        self
    }

    fn each_id(&mut self, mut visit: impl FnMut(&mut ClaimId, &mut u8)) {
        if let Some(row) = &mut self.row {
            visit(&mut row.holder, &mut row.token);
        }
        for worker in &mut self.workers {
            if let Some((id, token)) = worker.ids() {
                visit(id, token);
            }
        }
        if let Some(late) = &mut self.late {
            visit(&mut late.id, &mut late.token);
        }
    }
}
