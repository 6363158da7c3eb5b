package command

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/meander-rl/meander/schemas"
)

// outFolder returns the folder for the files of a run, by --out; "" for none.
func outFolder(given string, run schemas.Run) string {
	if given == "-" {
		return ""
	}
	return cmp.Or(given, filepath.Join("meander-out", string(run)))
}

// tryFolder makes the folder that a flag names, and checks that files can be written to it, before the work is done
// whose results go there. The error names the flag; an empty name is none.
func tryFolder(flag, dir string) error {
	if dir == "" {
		return nil
	}
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = tryWrite(dir)
	}
	if err != nil {
		return fmt.Errorf("%s: %w; must be a folder that can be written to", flag, err)
	}
	return nil
}

// tryFile checks that the file that a flag names can be written, before the work is done whose result goes there. The
// error names the flag; an empty name is none.
func tryFile(flag, name string) error {
	if name == "" {
		return nil
	}
	err := tryWrite(filepath.Dir(name))
	if info, there := os.Stat(name); there == nil && info.IsDir() {
		err = fmt.Errorf("%s is a folder", name)
	}
	if err != nil {
		return fmt.Errorf("%s: %w; must be a file that can be written", flag, err)
	}
	return nil
}

// tryReplace is tryFile for a file that may be there: that one must be a plain file that can be written.
func tryReplace(flag, name string) error {
	if err := tryFile(flag, name); err != nil {
		return err
	}
	info, err := os.Stat(name)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err == nil && !info.Mode().IsRegular():
		err = fmt.Errorf("%s is no plain file", name)
	case err == nil:
		var f *os.File
		if f, err = os.OpenFile(name, os.O_WRONLY, 0); err == nil {
			err = f.Close()
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w; must be a file that can be written", flag, err)
	}
	return nil
}

// tryWrite writes a file into a folder and removes it.
func tryWrite(dir string) error {
	f, err := os.CreateTemp(dir, ".meander-*")
	if err != nil {
		return err
	}
	_, err = f.WriteString("x")
	return errors.Join(err, f.Close(), os.Remove(f.Name()))
}

// replaceFile writes a file beside the one of that name and puts it in its place once it is whole; a link stays one. If
// it fails, nothing is left of it.
func replaceFile(name string, data []byte) error {
	if to, err := filepath.EvalSymlinks(name); err == nil {
		name = to
	}
	temporary := filepath.Join(filepath.Dir(name), ".meander-"+rand.Text())
	err := os.WriteFile(temporary, data, 0o644)
	if err == nil {
		err = os.Rename(temporary, name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temporary))
	}
	return nil
}
