package chaos

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// diskSize is what a disk holds while it is not full, in bytes.
const diskSize = 8 << 30

// Disk is a file system of its own, in memory, that can run full.
type Disk struct{ dir string }

// NewDisk mounts one on a folder, which takes the right to.
func NewDisk(dir string) (*Disk, error) {
	d := &Disk{dir}
	return d, d.mount(0, diskSize)
}

func (d *Disk) mount(flags uintptr, size int64) error {
	return unix.Mount("tmpfs", d.dir, "tmpfs", flags, fmt.Sprintf("size=%d", size))
}

// Fill takes away what is free, but for what is being written in that moment.
func (d *Disk) Fill() error {
	var err error
	for range 100 { // it cannot be smaller than what is on it
		var s unix.Statfs_t
		if err = unix.Statfs(d.dir, &s); err != nil {
			return err
		}
		if err = d.mount(unix.MS_REMOUNT, int64(s.Blocks-s.Bfree)*s.Bsize); err == nil {
			return nil
		}
	}
	return fmt.Errorf("fill %s: %w", d.dir, err)
}

// Empty gives it back.
func (d *Disk) Empty() error { return d.mount(unix.MS_REMOUNT, diskSize) }

// Close unmounts it.
func (d *Disk) Close() error { return unix.Unmount(d.dir, unix.MNT_DETACH) }
