package auth

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nats-io/nkeys"

	"github.com/meander-rl/meander/schemas"
)

// Files of a folder of credentials.
const (
	usersFile  = "users.json"
	rightsFile = "auth.conf"
	// ServerFile is the configuration of a separate NATS server.
	ServerFile = "nats.conf"
	// What the operator adds to the server's accounts, to share runs: what the pipeline's exports, and other accounts.
	exportsFile, accountsFile = "exports.conf", "accounts.conf"
)

// pipelineAccount is the account of a NATS server for all users. The server's default account could export nothing, as
// sharing a run with another account does.
const pipelineAccount = "meander"

// Folder is a folder of credentials: the users with their roles and public keys, one file with the secret key of
// each, the same as a NATS server's configuration, and certificates. A method that changes it returns after the
// change is on the disk.
type Folder struct {
	dir string
	// Account is the account of all users on a NATS server.
	Account string `json:"account"`
	Users   []User `json:"users"`
}

// InvalidError is a mistake in what the caller asked for.
type InvalidError struct{ error }

// Unwrap returns the mistake.
func (e *InvalidError) Unwrap() error { return e.error }

func invalidError(format string, args ...any) error {
	return &InvalidError{fmt.Errorf(format, args...)}
}

// errNoFolder refuses an empty path, which would mean the working folder.
var errNoFolder = invalidError(`folder of credentials: ""; must be a path`)

// Create makes a new folder of credentials, for 'meander auth init': one user for each role, and the configuration of
// a NATS server that listens on an address. If hosts is not nil (it may be empty), it also makes an authority and a
// certificate of the server for these hosts. It fails with *InvalidError if dir has files in it.
func Create(dir, listen string, hosts []string) (*Folder, error) {
	if dir == "" {
		return nil, errNoFolder
	}
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return nil, invalidError("%q: not empty; must be a new folder. "+
			"One of credentials is changed with: meander auth add, rm, update", dir)
	}
	dir, err := filepath.Abs(dir)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		return nil, err
	}
	f := &Folder{dir: dir, Account: pipelineAccount}
	if hosts != nil {
		if err := errors.Join(f.createAuthority(), f.createCertificate(hosts)); err != nil {
			return nil, err
		}
	}
	for _, g := range Grants() {
		if err := f.addUser(User{Name: string(g.Role), Role: g.Role}); err != nil {
			return nil, err
		}
	}
	return f, errors.Join(f.save(), os.WriteFile(f.path(ServerFile), []byte(f.serverConfig(listen)), 0o644))
}

// Open reads a folder of credentials and checks the rights and the key of each user. It fails with *InvalidError if
// there is no such folder, with another error if users.json is damaged.
func Open(dir string) (*Folder, error) {
	if dir == "" {
		return nil, errNoFolder
	}
	f := &Folder{dir: dir}
	file := f.path(usersFile)
	data, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		if entries, _ := os.ReadDir(dir); len(entries) > 0 { // Create refuses it
			return nil, invalidError("%q: no folder of credentials: it has no %s. Put that file back from a backup; "+
				"or make a new folder with all users anew, meander auth init NEW, and give it to the server and the "+
				"users", dir, usersFile)
		}
		return nil, invalidError("%q: no folder of credentials; make one with: meander auth init %s", dir, dir)
	}
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(data))
		d.DisallowUnknownFields() // of older releases: a user who was limited to runs must not see all
		err = d.Decode(f)
	}
	if err == nil && f.Account == "" {
		err = errors.New("account: missing; an older release made the folder: make a new one with meander auth init")
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	for i := range f.Users {
		u := &f.Users[i]
		if _, err := u.Rights(); err != nil {
			return nil, fmt.Errorf("%s: user %q: %w", file, u.Name, err)
		}
		if !nkeys.IsValidPublicUserKey(u.Key) {
			return nil, fmt.Errorf("%s: user %q: key: %q; must be the public key of a user (U...)", file, u.Name, u.Key)
		}
	}
	return f, nil
}

// Dir returns the path of the folder.
func (f *Folder) Dir() string { return f.dir }

func (f *Folder) path(name string) string { return filepath.Join(f.dir, name) }

// Credentials returns the path of the file with the secret key of a user.
func (f *Folder) Credentials(name string) string { return f.path(name + ".creds") }

// User returns the user with a name; nil: there is none.
func (f *Folder) User(name string) *User {
	i := slices.IndexFunc(f.Users, func(u User) bool { return u.Name == name })
	if i < 0 {
		return nil
	}
	return &f.Users[i]
}

// Names returns the names of all users.
func (f *Folder) Names() (names []string) {
	for _, u := range f.Users {
		names = append(names, u.Name)
	}
	return names
}

// Add adds a user: it makes a key and the only file that has it.
func (f *Folder) Add(u User) error {
	if err := f.addUser(u); err != nil {
		return err
	}
	return f.save()
}

// Remove removes a user from the folder and deletes the file of credentials. A running server keeps the user until it
// reads its configuration again. An unknown name is an *InvalidError.
func (f *Folder) Remove(name string) error {
	if f.User(name) == nil {
		return invalidError("%q: no such user; there are %s", name, strings.Join(f.Names(), ", "))
	}
	f.Users = slices.DeleteFunc(f.Users, func(u User) bool { return u.Name == name })
	if err := os.Remove(f.Credentials(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return f.save()
}

// Update writes the rights of all users as this release of meander defines them. If the folder has a certificate, or
// hosts are given, it makes a new certificate of the server, for the old hosts and these. An error is about
// the files; without the certificate the rights stay as they are.
func (f *Folder) Update(hosts []string) error {
	cert, err := f.Certificate()
	switch {
	case err != nil:
		return err
	case cert != nil:
		err = f.createCertificate(slices.Concat(Hosts(cert), hosts))
	case len(hosts) > 0:
		if err = f.createAuthority(); err == nil {
			err = f.createCertificate(hosts)
		}
	}
	if err != nil {
		return err
	}
	return f.save()
}

// addUser checks a user, makes its key and writes its file of credentials. The caller saves the folder. A name, role
// or limit that may not be is an *InvalidError; other errors are about the file.
func (f *Folder) addUser(u User) error {
	if err := schemas.CheckToken("name", u.Name); err != nil {
		return &InvalidError{err}
	}
	if f.User(u.Name) != nil {
		return invalidError("name: %q; there is such a user, choose another name or remove that one", u.Name)
	}
	pair, err := nkeys.CreateUser()
	if err != nil {
		return err
	}
	defer pair.Wipe()
	if u.Key, err = pair.PublicKey(); err != nil {
		return err
	}
	if _, err := u.Rights(); err != nil {
		return &InvalidError{err}
	}
	seed, err := pair.Seed()
	if err != nil {
		return err
	}
	text := fmt.Sprintf("# meander credentials: give this file only to the program or person that has this role.\n# "+
		"role: %s\n%s\n", u.Role, seed)
	if err := createFile(f.Credentials(u.Name), []byte(text), 0o600); err != nil {
		return err
	}
	f.Users = append(f.Users, u)
	return nil
}

// save writes users.json and the file of rights that the server's configuration includes. Each file is replaced
// whole; after an error one of them may be the old one.
func (f *Folder) save() error {
	data, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	rights, err := f.rightsConfig()
	if err != nil {
		return err
	}
	return errors.Join(
		replaceFile(f.path(usersFile), append(data, '\n'), 0o600),
		replaceFile(f.path(rightsFile), []byte(rights), 0o644),
	)
}

// createFile writes a file that must not exist yet.
func createFile(path string, data []byte, mode os.FileMode) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	return errors.Join(err, file.Close())
}

// replaceFile writes a file beside the given path and renames it to it, so that no reader sees half of it. After an
// error the old file is still there.
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
