package command

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nats-io/nkeys"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/schemas"
)

// Files of a folder of credentials.
const (
	usersFile  = "users.json"
	rightsFile = "auth.conf"
	serverFile = "nats.conf"
)

// authFolder is a folder that says who may do what: users with their roles and public keys. What
// the roles may do is bus.Grants.
type authFolder struct {
	dir string
	// Account of a NATS server that all are in who are no guests; empty in folders of an older kind:
	// the server's default account, from which nothing can be given to guests.
	Account string     `json:"account,omitempty"`
	Users   []authUser `json:"users"`
}

// authUser is one user of the server.
type authUser struct {
	Name string   `json:"name"`
	Role bus.Role `json:"role"`
	// Runs it is limited to; none: all. Blobs: it may fetch blobs all the same.
	Runs  []schemas.Run `json:"runs,omitempty"`
	Blobs bool          `json:"blobs,omitempty"`
	// CopyBytes is what the copies may take that a guest reads; 0: bus.DefaultCopyBytes.
	CopyBytes int64 `json:"copy_bytes,omitempty"`
	// Mark is the part of the names of a guest's durables that others cannot guess; empty in folders of an older kind.
	Mark string `json:"mark,omitempty"`
	// Key is the public one. The other is in the user's file, and nowhere else.
	Key string `json:"key"`
}

func openAuth(dir string) (*authFolder, error) {
	f := &authFolder{dir: dir}
	data, err := os.ReadFile(filepath.Join(dir, usersFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, usage(fmt.Errorf("%q: no folder of credentials; make one with: meander auth init %s", dir, dir))
	}
	if err == nil {
		err = json.Unmarshal(data, f)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", filepath.Join(dir, usersFile), err)
	}
	for _, u := range f.Users {
		if _, err := u.rights(); err != nil {
			return nil, fmt.Errorf("%s: user %q: %w", filepath.Join(dir, usersFile), u.Name, err)
		}
		if !nkeys.IsValidPublicUserKey(u.Key) {
			return nil, fmt.Errorf("%s: user %q: key: %q; must be the public key of a user (U...)", filepath.Join(dir, usersFile), u.Name, u.Key)
		}
	}
	return f, nil
}

func (u authUser) rights() (bus.Rights, error) {
	g, ok := bus.GrantOf(u.Role)
	if !ok {
		return bus.Rights{}, fmt.Errorf("role: %q; must be one of %s", u.Role, strings.Join(roleNames(), ", "))
	}
	return g.Rights(u.Key, u.Runs, u.Blobs)
}

func roleNames() []string {
	var names []string
	for _, g := range bus.Grants() {
		names = append(names, string(g.Role))
	}
	return names
}

func (f *authFolder) credentials(name string) string { return filepath.Join(f.dir, name+".creds") }

func (f *authFolder) index(name string) int {
	return slices.IndexFunc(f.Users, func(u authUser) bool { return u.Name == name })
}

// add makes a key for a user, and the one file that has it.
func (f *authFolder) add(u authUser) error {
	if err := schemas.CheckToken("name", u.Name); err != nil {
		return usage(err)
	}
	if f.index(u.Name) >= 0 {
		return usage(fmt.Errorf("name: %q; there is such a user, choose another name or remove that one", u.Name))
	}
	for _, run := range u.Runs {
		if err := schemas.CheckToken("--run", run); err != nil {
			return usage(fmt.Errorf("%w; the server knows whole names, not patterns", err))
		}
	}
	if u.Blobs && len(u.Runs) == 0 {
		return usage(errors.New("--blobs: without --run; who may read all runs has them already"))
	}
	if u.CopyBytes > 0 && len(u.Runs) == 0 {
		return usage(errors.New("--copy-bytes: without --run; who may read all runs has no copies"))
	}
	pair, err := nkeys.CreateUser()
	if err != nil {
		return err
	}
	defer pair.Wipe()
	if u.Key, err = pair.PublicKey(); err != nil {
		return err
	}
	if _, err := u.rights(); err != nil {
		return usage(err)
	}
	seed, err := pair.Seed()
	if err != nil {
		return err
	}
	text := fmt.Sprintf("# meander credentials: keep this file to whoever is to have this role.\n# role: %s\n# runs: %s\n%s\n", u.Role, runsOf(u.Runs), seed)
	if err := writeNew(f.credentials(u.Name), []byte(text), 0o600); err != nil {
		return err
	}
	f.Users = append(f.Users, u)
	f.markGuests()
	return nil
}

// markGuests gives those guests a mark who have none.
func (f *authFolder) markGuests() {
	for i := range f.Users {
		if u := &f.Users[i]; len(u.Runs) > 0 && u.Mark == "" {
			u.Mark = rand.Text()
		}
	}
}

// runsOf is the runs a user is limited to, as text.
func runsOf(runs []schemas.Run) string {
	if len(runs) == 0 {
		return "*"
	}
	var names []string
	for _, r := range runs {
		names = append(names, string(r))
	}
	return strings.Join(names, ",")
}

func (f *authFolder) remove(name string) error {
	i := f.index(name)
	if i < 0 {
		return usage(fmt.Errorf("%q: no such user; there are %s", name, strings.Join(f.names(), ", ")))
	}
	f.Users = slices.Delete(f.Users, i, i+1)
	if err := os.Remove(f.credentials(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func (f *authFolder) names() []string {
	var names []string
	for _, u := range f.Users {
		names = append(names, u.Name)
	}
	return names
}

// write brings users.json and the server's file of rights up to date.
func (f *authFolder) write() error {
	data, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	rights, err := f.render()
	if err != nil {
		return err
	}
	return errors.Join(
		replaceFile(filepath.Join(f.dir, usersFile), append(data, '\n'), 0o600),
		replaceFile(filepath.Join(f.dir, rightsFile), []byte(rights), 0o644),
	)
}

func (f *authFolder) path(name string) string { return filepath.Join(f.dir, name) }

// writeNew writes a file that must not be there yet.
func writeNew(path string, data []byte, mode os.FileMode) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	return errors.Join(err, file.Close())
}

// replaceFile replaces a file whole, so that no reader sees half of it.
func replaceFile(path string, data []byte, mode os.FileMode) error {
	file, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err = errors.Join(err, file.Chmod(mode), file.Close()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return nil
}
