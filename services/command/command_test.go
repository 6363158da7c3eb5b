package command

import (
	"os"
	"testing"
	"time"
)

// A command that does not come to its end after a signal is ended.
func TestUntilSignal(t *testing.T) {
	overdue := make(chan struct{})
	ctx := untilSignal(time.Millisecond, func() { close(overdue) })
	if err := ctx.Err(); err != nil {
		t.Fatalf("before the signal: %v", err)
	}
	self, err := os.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if err := self.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	<-overdue
}
