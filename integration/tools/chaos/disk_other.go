//go:build !linux

package chaos

import "errors"

// Disk is a file system that can run full; there is none here.
type Disk struct{}

// NewDisk fails.
func NewDisk(string) (*Disk, error) { return nil, errors.New("only on Linux") }

// Fill does nothing.
func (*Disk) Fill() error { return nil }

// Empty does nothing.
func (*Disk) Empty() error { return nil }

// Close does nothing.
func (*Disk) Close() error { return nil }
