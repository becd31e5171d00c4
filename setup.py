from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

EXTRAS = {
    # psycopg2 is compiled against the libpq of the machine (it needs a C compiler and libpq-dev). Its makers
    # advise against psycopg2-binary in production, where the libpq and libssl in the wheel are never updated.
    'postgresql': ['psycopg2 >= 2.9'],
    # Needs no compiler.
    'psycopg': ['psycopg[binary] >= 3.1'],
    # mysqlclient is compiled against libmariadb or libmysqlclient (a C compiler, and libmariadb-dev).
    'mysql': ['mysqlclient >= 2.2'],
    # Needs no compiler. What rsa brings, MySQL wants for passwords where the connection is not encrypted.
    'pymysql': ['PyMySQL[rsa] >= 1.2'],
    # In its thin mode it needs no client library.
    'oracle': ['oracledb >= 2'],
    # In Python alone. pylibmc does as well, but a broken answer can break its C library and with it the process.
    'memcached': ['pymemcache >= 4'],
    # Blobs in S3, or what speaks as it does. Other object storages need what fsspec needs for them.
    's3': ['s3fs >= 2025.2'],
    # Bars and tables on a terminal: needed by `relstore demo`, and used by the other commands where it is there.
    'cli': ['rich >= 13'],
}
EXTRAS['demo'] = EXTRAS['cli']
EXTRAS['all'] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})
EXTRAS['test'] = [
    'hypothesis >= 6',
    'psycopg2-binary >= 2.9',  # not psycopg2: a test run must not need a compiler
    'zope.testing >= 5',  # ZODB.tests.util imports it
    'zope.testrunner >= 6',
    *EXTRAS['psycopg'],
    *EXTRAS['pymysql'],  # mysqlclient likewise is there or not
    *EXTRAS['oracle'],
    # What is written for Oracle: it is parsed, and run in Java, where H2 stands in.
    'sqlglot >= 25',
    'JPype1 >= 1.5',
    *EXTRAS['memcached'],
    # Its makers publish wheels for these alone; elsewhere it is there or not.
    'pylibmc >= 1.6 ; python_version < "3.12" and sys_platform == "linux" and platform_machine == "x86_64"',
    'ZEO >= 6',
    'zc.zlibstorage >= 1.2',
    'zc.zodbdgc >= 1.1',
    *EXTRAS['cli'],
    *EXTRAS['s3'],
    # An S3 server of our own: moto, and what its server needs besides.
    'moto[s3] >= 5.1',
    'flask >= 3',
    'flask-cors >= 5',
]

setup(
    name='relstore',
    version='0.1.0.dev0',
    description='A ZODB storage in a relational database, in pure Python',
    long_description='\n\n'.join((HERE / name).read_text('utf-8') for name in ('README.txt', 'CHANGES.txt')),
    long_description_content_type='text/x-rst',
    author='relstore contributors',
    license='MIT',
    license_files=['LICENSE.txt'],
    keywords='ZODB storage PostgreSQL MySQL MariaDB SQLite Zope Plone',
    classifiers=[
        'Development Status :: 3 - Alpha',
        'Framework :: ZODB',
        'Intended Audience :: Developers',
        'Intended Audience :: System Administrators',
        'Operating System :: POSIX',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3 :: Only',
        'Topic :: Database',
    ],
    package_dir={'': 'src'},
    packages=find_packages('src'),
    package_data={'': ['component.xml'], 'relstore.adapters': ['sql/*.sql', 'sql/migrations/*.sql']},
    zip_safe=False,
    python_requires='>=3.10',
    install_requires=['ZODB >= 5.8'],
    extras_require=EXTRAS,
    entry_points={'console_scripts': [
        'relstore = relstore.cli.main:main',
        'zodbpack = relstore.cli.zodbpack:main',
        'zodbconvert = relstore.cli.convert:main',
    ]},
)
