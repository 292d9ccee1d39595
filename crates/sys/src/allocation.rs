//! Counts the allocations of a process, for a build that measures them.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicU64, Ordering},
};

static COUNT: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, which counts its calls.
#[derive(Debug)]
pub struct CountingAllocator;

/// How often this process has allocated or enlarged memory, if its allocator is
/// [`CountingAllocator`].
#[must_use]
pub fn count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

// SAFETY: every call is passed on to the system's allocator, which keeps the contract. Counting
// neither allocates nor panics.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of the same function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of the same function.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of the same function.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of the same function.
        unsafe { System.realloc(memory, layout, new_size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_allocation_counts() {
        let before = count();
        let layout = Layout::from_size_align(8, 8).unwrap();
        // SAFETY: the size is not zero, and the memory is freed with the layout that it has then.
        unsafe {
            let memory = CountingAllocator.alloc(layout);
            let memory = CountingAllocator.realloc(memory, layout, 16);
            CountingAllocator.dealloc(memory, Layout::from_size_align(16, 8).unwrap());
        }
        assert_eq!(count() - before, 2);
    }
}
